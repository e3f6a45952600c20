"""`python -m tests.fuzz --plans 1000`: many random plans, each held to the equality contract.

`--replay 'LINE'` tries the training of one line again. Exits with 1 if any failed.
"""

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fuzz.draw import covered, draw_random, wishes
from tests.fuzz.drawn import Drawn
from tests.fuzz.runner import EQUAL, FAILED, REFUSED, Runner, Tried, runner


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    with runner() as its:
        if given.replay is not None:
            tried = [_try(its, 0, Drawn.parse(given.replay))]
            print(tried[0].text)
        else:
            end = time.monotonic() + 60 * given.minutes
            tried = [_try(its, number, drawn) for number, drawn in _drawings(given) if time.monotonic() < end]
    _summarize(tried)
    return int(any(each.result == FAILED for each in tried))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--plans", type=int, default=1000, help="how many")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after so many")
    parser.add_argument("--seed", type=int, default=0, help="another one draws others")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="only every N-th plan, from the I-th")
    parser.add_argument("--replay", metavar="LINE", help="the line of one training")
    return parser.parse_args(arguments)


def _drawings(given: argparse.Namespace) -> Iterator[tuple[int, Drawn]]:
    """Plans by number; each has one of the wishes in turn, so that rare values come as often as others."""
    shard, shards = map(int, given.shard.split("/"))
    turns = list(wishes())
    for number in range(shard - 1, given.plans, shards):
        yield number, draw_random(f"{given.seed}/{number}", turns[number % len(turns)])


def _try(its: Runner, number: int, drawn: Drawn) -> Tried:
    tried = its.try_(drawn)
    print(f"{number:5} {tried.result:8} {tried.seconds:5.2f} s  {drawn}", flush=True)
    if tried.result == FAILED:
        stacks = Path(tempfile.gettempdir()) / f"echelon-fuzz-{os.getpid()}-{number}.txt"
        stacks.write_text(tried.text)
        print(f"      {tried.summary}\n      all of it: {stacks}")
        print(f"      again: python -m tests.fuzz --replay {shlex.quote(str(drawn))}", flush=True)
    return tried


def _summarize(tried: Sequence[Tried]) -> None:
    """What was tried of each field, refusals by rule, and the failures again."""
    print("\nfield values, of the trainings that ran:")
    ran = Counter(pair for each in tried if each.result != REFUSED for pair in covered(each.drawn))
    for field in dict.fromkeys(field for field, _ in ran):
        values = sorted((str(value), times) for (name, value), times in ran.items() if name == field)
        print(f"  {field:14} {'  '.join(f'{value}: {times}' for value, times in values)}")
    print("refusals by rule:")
    rules = Counter(rule for each in tried if each.result == REFUSED for rule in each.rules)
    for rule, times in rules.items():
        print(f"  {times:4} × {rule}")
    print("failures:")
    for each in tried:
        if each.result == FAILED:
            print(f"  {each.text.splitlines()[0]}\n    --replay {shlex.quote(str(each.drawn))}")
    results = Counter(each.result for each in tried)
    seconds = sum(each.seconds for each in tried) / max(1, len(tried))
    told = ", ".join(f"{results[result]} {result}" for result in (EQUAL, REFUSED, FAILED))
    print(f"{len(tried)} plans: {told}; {seconds:.2f} seconds a plan")


if __name__ == "__main__":
    sys.exit(main())
