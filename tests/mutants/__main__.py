"""`python -m tests.mutants`: plants each mutant in a copy of the sources, and runs the tests named for it.

Exits with 1 if fewer than 95 % are found, with 2 if the list or the tests are not in order.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.result import make_result

from tests.mutants.mutant import load_mutants
from tests.mutants.runner import FOUND, HANGING, INVALID, SURVIVED, Outcome, Runner

_LEAST_FOUND = 0.95
_CLEAN_TIMEOUT = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    mutants = [m for m in load_mutants() if not options.only or m.name in options.only]
    errors = [error for mutant in mutants for error in mutant.errors()]
    errors += [f"{name}: no such mutant" for name in options.only if name not in {m.name for m in mutants}]
    if errors or not mutants:
        print("\n".join(errors) or "no mutants")
        return 2
    start = time.monotonic()
    with Runner(jobs=options.jobs, timeout=options.timeout) as runner:
        if not options.no_clean_run:
            output = runner.check_clean((test for m in mutants for test in m.tests), _CLEAN_TIMEOUT)
            if output is not None:
                print(f"{output}\nthe named tests must pass without a mutant")
                return 2
            print(f"the named tests pass without a mutant ({time.monotonic() - start:.0f} s)", flush=True)
        outcomes = []
        for outcome in runner.run_all(mutants):
            _show(outcome)
            outcomes.append(outcome)
    return _summarize(outcomes, time.monotonic() - start, options)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run only these mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which tests hang")
    parser.add_argument("--no-clean-run", action="store_true", help="do not run the tests unchanged first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome of each mutant here")
    return parser.parse_args(arguments)


def _show(outcome: Outcome) -> None:
    mutant = outcome.mutant
    print(f"{outcome.result:13} {outcome.seconds:6.1f} s  {mutant.name}  ({mutant.file})", flush=True)
    if outcome.output:
        print(outcome.output)


def _summarize(outcomes: Sequence[Outcome], seconds: float, options: argparse.Namespace) -> int:
    counts = Counter(outcome.result for outcome in outcomes)
    num_found = sum(outcome.is_found for outcome in outcomes)
    share = num_found / len(outcomes)
    print(f"\n{num_found} of {len(outcomes)} mutants found ({share:.1%}) in {seconds:.0f} s")
    print(f"survived or invalid: {', '.join(_names(outcomes)) or 'none'}")
    if options.json is not None:
        settings = {"mutants": len(outcomes), "jobs": options.jobs, "seconds": round(seconds)}
        settings["clean run"] = not options.no_clean_run
        settings |= {kind: counts[kind] for kind in (FOUND, HANGING, SURVIVED, INVALID)}
        result = make_result("mutants", "make mutants", settings, ())
        plain = [_as_plain(outcome) for outcome in outcomes]
        text = json.dumps(dataclasses.asdict(result) | {"outcomes": plain}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(share < _LEAST_FOUND)


def _names(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.mutant.name for outcome in outcomes if not outcome.is_found]


def _as_plain(outcome: Outcome) -> dict[str, object]:
    mutant, seconds = outcome.mutant, round(outcome.seconds, 1)
    return {"name": mutant.name, "file": mutant.file, "result": outcome.result, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
