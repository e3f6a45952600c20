"""`python -m tests.fuzz_parsers --inputs 100000`: parsers read random inputs. Exits with 1 if any failed."""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz_parsers.runner import FAILED, OK, REFUSED, Outcome, limit_memory, run_input
from tests.fuzz_parsers.targets import Target, targets

_SHOWN_FAILURES = 10


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    shard, shards = map(int, options.shard.split("/"))
    numbers = range(shard - 1, options.inputs, shards) if options.number is None else [options.number]
    with tempfile.TemporaryDirectory(prefix="echelon-fuzz-") as temporary:
        folder = Path(temporary) / "a" / "b" / "c"  # for inputs with ".."
        folder.mkdir(parents=True)
        os.chdir(folder)
        known = [each for each in targets(folder) if options.target in (None, each.name)]
        limit_memory()
        begin = time.monotonic()
        counts, failures = _run(known, options.seed, numbers)
    _summarize(known, counts, time.monotonic() - begin)
    for outcome in failures[:_SHOWN_FAILURES]:
        _show(outcome, options)
    return int(bool(failures))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_parsers", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="how many to parse")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other inputs")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="only every N-th input, from the I-th")
    parser.add_argument("--target", help="only this parser")
    parser.add_argument("--number", type=int, help="only the input of this number")
    return parser.parse_args(arguments)


def _run(
    known: list[Target], seed: int, numbers: Sequence[int]
) -> tuple[Counter[tuple[str, str]], list[Outcome]]:
    counts: Counter[tuple[str, str]] = Counter()
    seconds: Counter[str] = Counter()
    failures: list[Outcome] = []
    for number in numbers:
        outcome = run_input(known, seed, number)
        counts[outcome.target, outcome.result] += 1
        seconds[outcome.target] += outcome.seconds
        if outcome.result == FAILED:
            failures.append(outcome)
            print(f"{number:7} {outcome.target}: {outcome.text.strip().splitlines()[-1][:200]}", flush=True)
    print("  ".join(f"{name}: {each:.1f} s" for name, each in seconds.items()))
    return counts, failures


def _show(outcome: Outcome, options: argparse.Namespace) -> None:
    target = "" if options.target is None else f" --target '{options.target}'"
    print(f"\n{outcome.target}, {len(outcome.data)} bytes: {outcome.data[:300]!r}\n{outcome.text[-3000:]}")
    print(f"again: python -m tests.fuzz_parsers --seed {options.seed} --number {outcome.number}{target}")


def _summarize(known: list[Target], counts: Counter[tuple[str, str]], seconds: float) -> None:
    for target in known:
        results = ", ".join(f"{counts[target.name, each]} {each}" for each in (OK, REFUSED, FAILED))
        print(f"{target.name:18} {results}")
    failed = sum(count for (_, result), count in counts.items() if result == FAILED)
    print(f"{counts.total()} inputs in {seconds:.0f} s: {failed} failed")


if __name__ == "__main__":
    sys.exit(main())
