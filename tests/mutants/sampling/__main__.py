"""`python -m tests.mutants.sampling`: makes changes that are drawn by a seed, and runs tests against each.

Exits with 1 if fewer than 85 % are found, or fewer than 75 % of a package. The result, with the difference
of each mutant that no test finds, is written after each of them.
"""

import argparse
import dataclasses
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from compileall import compile_dir
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from benchmarks.result import make_result

from tests.mutants.runner import Runner
from tests.mutants.sampling.coverage import Coverage
from tests.mutants.sampling.draw import HEART, DrawnMutant, draw
from tests.mutants.sampling.recording import MAP
from tests.mutants.sampling.verdict import Judge, Verdict

_LEAST_FOUND, _LEAST_OF_PACKAGE = 0.85, 0.75


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    coverage = Coverage.load(options.map)
    drawn = draw(options.count, options.seed, options.packages)
    drawn = [replace(mutant, tests=coverage.tests_of(mutant)) for mutant in drawn]
    # So that a run that is ended early has tried about as many of each package.
    random.Random(options.seed).shuffle(drawn)
    command = f"python -m tests.mutants.sampling --count {options.count} --seed {options.seed}"
    settings = {"seed": options.seed, "drawn": len(drawn), "workers": options.workers}
    record = dataclasses.asdict(make_result("mutants-sampled", command, settings, ()))
    verdicts = []
    with Runner(jobs=options.workers) as runner:
        compile_dir(runner.clean, quiet=1)  # once, not in each process of each mutant
        judge = Judge(runner, coverage, options.patience)
        for verdict in _run(judge, drawn, options):
            verdicts.append(verdict)
            _show(verdict, len(verdicts))
            if options.json is not None:
                text = json.dumps(record | _summary(verdicts, judge), indent=2)
                options.json.write_text(text + "\n", encoding="utf-8")
    return _report(verdicts, judge)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.sampling", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="mutants, spread over the packages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", default=tuple(HEART), choices=tuple(HEART), metavar="NAME")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which tests hang")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin with no further mutant after these")
    parser.add_argument("--map", type=Path, default=MAP, help="which tests run which lines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    return parser.parse_args(arguments)


def _run(judge: Judge, drawn: Sequence[DrawnMutant], options: argparse.Namespace) -> Iterator[Verdict]:
    end = time.monotonic() + 60 * options.minutes

    def run(mutant: DrawnMutant) -> Verdict | None:
        return judge.judge(mutant) if time.monotonic() < end else None

    with ThreadPoolExecutor(options.workers) as executor:
        for future in as_completed([executor.submit(run, mutant) for mutant in drawn]):
            verdict = future.result()
            if verdict is not None:
                yield verdict


def _show(verdict: Verdict, number: int) -> None:
    print(f"{number:4} {verdict.result:13} {verdict.seconds:6.1f} s  {verdict.mutant.name}  {verdict.by}")
    if not verdict.is_found:
        print("\n".join(verdict.mutant.diff()), verdict.output, sep="\n", flush=True)


def _shares(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    shares = {}
    for package in HEART:
        of_package = [verdict for verdict in verdicts if verdict.mutant.package == package]
        if of_package:
            found = sum(verdict.is_found for verdict in of_package)
            shares[package] = {
                "run": len(of_package),
                "found": found,
                "share": round(found / len(of_package), 3),
            }
    return shares


def _summary(verdicts: Sequence[Verdict], judge: Judge) -> dict[str, object]:
    found = sum(verdict.is_found for verdict in verdicts)
    return {
        "run": len(verdicts),
        "found": found,
        "share": round(found / len(verdicts), 3),
        "packages": _shares(verdicts),
        "survivors": [
            {
                "place": f"{verdict.mutant.file}:{verdict.mutant.change.line}",
                "kind": verdict.mutant.change.kind,
                "result": verdict.result,
                "diff": verdict.mutant.diff(),
            }
            for verdict in verdicts
            if not verdict.is_found
        ],
        "tests that fail here without a change": sorted(judge.failing),
        "outcomes": [
            {
                "name": verdict.mutant.name,
                "result": verdict.result,
                "seconds": round(verdict.seconds, 1),
                "by": verdict.by,
            }
            for verdict in verdicts
        ],
    }


def _report(verdicts: Sequence[Verdict], judge: Judge) -> int:
    shares = _shares(verdicts)
    for package, row in shares.items():
        print(f"{package:16} {row['found']:3} of {row['run']:3}  {row['share']:.0%}")
    found = sum(verdict.is_found for verdict in verdicts)
    print(f"{found} of {len(verdicts)} found ({found / len(verdicts):.1%})")
    if judge.failing:
        print(f"these fail without a change and were left out: {', '.join(sorted(judge.failing))}")
    is_low = any(row["share"] < _LEAST_OF_PACKAGE for row in shares.values())
    return int(is_low or found < _LEAST_FOUND * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
