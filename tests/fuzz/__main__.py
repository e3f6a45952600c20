"""`python -m tests.fuzz --plans 1000`: verify many random trainings, each a model with a plan.

`--jobs N` runs N parts at a time, each in a process of its own, and `--part I/N` one of them. `--json FILE`
keeps the result. `--matrix` runs each model of transformers with each plan word instead of random ones.
`--replay 'LINE'` runs the training of one line again. Exits with 1 if any failed.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fuzz.draw import draw_random, field_values, wishes
from tests.fuzz.matrix import cells
from tests.fuzz.random_training import RandomTraining
from tests.fuzz.record import merge, merge_cells, part_of, write
from tests.fuzz.runner import EQUAL, FAILED, REFUSED, Attempt, Runner, open_runner


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.jobs > 1:
        return _run_parts(options)
    with open_runner(with_pool=options.replay is None) as runner:
        if options.replay is not None:
            attempts = [_run(runner, 0, RandomTraining.parse(options.replay))]
            print(attempts[0].text)
        else:
            end = time.monotonic() + 60 * options.minutes
            attempts = []
            for number, training in _trainings(options):
                if time.monotonic() < end:
                    attempts.append(_run(runner, number, training))
                    if options.json is not None:
                        write(part_of(attempts), options.json)
    _summarize(attempts)
    return int(any(attempt.result == FAILED for attempt in attempts))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--plans", type=int, default=1000, help="how many to run")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no training after this time"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other plans")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="only every N-th plan, from the I-th")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="run N parts at a time")
    parser.add_argument("--matrix", action="store_true", help="every cell of the table of models and plans")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--replay", metavar="LINE", help="the line of one training")
    return parser.parse_args(arguments)


def _run_parts(options: argparse.Namespace) -> int:
    """All parts at a time. The record of what has ended is kept up to date: it outlives an early end."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz"]
    chosen = ["--matrix"] if options.matrix else [f"--plans={options.plans}", f"--seed={options.seed}"]
    shared = [*chosen, f"--minutes={options.minutes}"]
    line = " ".join(["python -m tests.fuzz", *chosen, f"--jobs={options.jobs}"])
    settings = {} if options.matrix else {"plans": options.plans, "seed": options.seed}
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="echelon-fuzz-") as folder:
        files = [Path(folder) / f"{part}.json" for part in range(1, options.jobs + 1)]
        processes = [
            subprocess.Popen([*command, *shared, "--part", f"{part}/{options.jobs}", "--json", str(file)])
            for part, file in enumerate(files, 1)
        ]
        running = len(processes)
        while running:
            time.sleep(2)
            running = sum(process.poll() is None for process in processes)
            parts = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
            now = {"parts": options.jobs, "seconds": round(time.monotonic() - start), "running": running}
            record = (merge_cells if options.matrix else merge)(parts, line, now | settings)
            if options.json is not None:
                write(record, options.json)
    print(json.dumps({name: record[name] for name in ("settings", "models", "refusals")}, indent=2))
    print(json.dumps(record["failures"], indent=2))
    return int(any(process.returncode for process in processes) or len(parts) < len(files))


def _trainings(options: argparse.Namespace) -> Iterator[tuple[int, RandomTraining]]:
    """Plans by number; each has one of the wishes in turn, so that rare values run as often as others."""
    part, parts = map(int, options.part.split("/"))
    if options.matrix:
        yield from list(enumerate(training for _, training in cells()))[part - 1 :: parts]
        return
    turns = list(wishes())
    for number in range(part - 1, options.plans, parts):
        yield number, draw_random(f"{options.seed}/{number}", turns[number % len(turns)])


def _run(runner: Runner, number: int, training: RandomTraining) -> Attempt:
    attempt = runner.run(training)
    print(f"{number:5} {attempt.result:8} {attempt.seconds:5.2f} s  {training}", flush=True)
    if attempt.result == REFUSED:
        print("\n".join(f"      {rule}" for rule in attempt.rules), flush=True)
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
