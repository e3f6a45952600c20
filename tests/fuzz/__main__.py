"""`python -m tests.fuzz --plans 1000`: verify many random plans.

`--replay 'LINE'` runs the training of one line again. Exits with 1 if any failed.
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

from tests.fuzz.draw import draw_random, field_values, wishes
from tests.fuzz.random_training import RandomTraining
from tests.fuzz.runner import EQUAL, FAILED, REFUSED, Attempt, Runner, open_runner


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    with open_runner() as runner:
        if options.replay is not None:
            attempts = [_run(runner, 0, RandomTraining.parse(options.replay))]
            print(attempts[0].text)
        else:
            end = time.monotonic() + 60 * options.minutes
            attempts = [
                _run(runner, number, training)
                for number, training in _trainings(options)
                if time.monotonic() < end
            ]
    _summarize(attempts)
    return int(any(attempt.result == FAILED for attempt in attempts))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--plans", type=int, default=1000, help="how many to run")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no training after this time"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other plans")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="only every N-th plan, from the I-th")
    parser.add_argument("--replay", metavar="LINE", help="the line of one training")
    return parser.parse_args(arguments)


def _trainings(options: argparse.Namespace) -> Iterator[tuple[int, RandomTraining]]:
    """Plans by number; each has one of the wishes in turn, so that rare values run as often as others."""
    shard, shards = map(int, options.shard.split("/"))
    turns = list(wishes())
    for number in range(shard - 1, options.plans, shards):
        yield number, draw_random(f"{options.seed}/{number}", turns[number % len(turns)])


def _run(runner: Runner, number: int, training: RandomTraining) -> Attempt:
    attempt = runner.run(training)
    print(f"{number:5} {attempt.result:8} {attempt.seconds:5.2f} s  {training}", flush=True)
    if attempt.result == FAILED:
        stacks = Path(tempfile.gettempdir()) / f"echelon-fuzz-{os.getpid()}-{number}.txt"
        stacks.write_text(attempt.text)
        print(f"      {attempt.summary}\n      full text: {stacks}")
        print(f"      again: python -m tests.fuzz --replay {shlex.quote(str(training))}", flush=True)
    return attempt


def _summarize(attempts: Sequence[Attempt]) -> None:
    """Print how often each value ran, refusals by rule, and the failures again."""
    print("\nfield values, of the trainings that ran:")
    ran = Counter(
        pair for attempt in attempts if attempt.result != REFUSED for pair in field_values(attempt.training)
    )
    for field in dict.fromkeys(field for field, _ in ran):
        values = sorted((str(value), times) for (name, value), times in ran.items() if name == field)
        print(f"  {field:14} {'  '.join(f'{value}: {times}' for value, times in values)}")
    print("refusals by rule:")
    rules = Counter(rule for attempt in attempts if attempt.result == REFUSED for rule in attempt.rules)
    for rule, times in rules.items():
        print(f"  {times:4} × {rule}")
    print("failures:")
    for attempt in attempts:
        if attempt.result == FAILED:
            print(f"  {attempt.text.splitlines()[0]}\n    --replay {shlex.quote(str(attempt.training))}")
    results = Counter(attempt.result for attempt in attempts)
    seconds = sum(attempt.seconds for attempt in attempts) / max(1, len(attempts))
    counts = ", ".join(f"{results[result]} {result}" for result in (EQUAL, REFUSED, FAILED))
    print(f"{len(attempts)} plans: {counts}; {seconds:.2f} seconds per plan")


if __name__ == "__main__":
    sys.exit(main())
