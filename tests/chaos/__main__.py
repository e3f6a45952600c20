"""`python -m tests.chaos --kills 200`: kill ranks and trainings at random; every run must end as undisturbed.

Half of the kills come during a save, some while ranks start; every tenth kills the parent, and `--resume`
goes on. Every third run keeps copies in memory. Exits with 1 if anything was lost, damaged or left behind.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.kill import PLANS, draw_kills
from tests.chaos.parent import ParentKill, train_with_resumes
from tests.chaos.training import STEPS, differences, short_job, train_disturbed, train_undisturbed

KILLS_PER_RUN = 10
KEEPS_IN_MEMORY = 3  # one run of so many
PARENT_KILLS = 2  # of a run whose parent is killed


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    shard, shards = map(int, options.shard.split("/"))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    references: dict[str, Path] = {}
    kills = failures = number = 0
    while kills < options.kills:
        is_mine = number % shards == shard - 1
        wanted = min(KILLS_PER_RUN, options.kills - kills)
        if is_mine:
            began = time.monotonic()
            done, problems = _attempt(f"{options.seed}/{number}", number, wanted, folder, references)
            result = "ok" if not problems else "FAILED"
            print(f"{number:4} {result:6} {time.monotonic() - began:6.1f} s  {done}", flush=True)
            for problem in problems:
                print(f"       {problem}", flush=True)
            failures += bool(problems)
        kills += wanted
        number += 1
    print(f"{number} runs, {kills} kills in all shards; {failures} runs of this shard failed")
    if failures:
        print(f"their folders are in {folder}")
    else:
        shutil.rmtree(folder)
    return int(failures > 0)


def _attempt(
    seed: str, number: int, wanted: int, folder: Path, references: dict[str, Path]
) -> tuple[str, list[str]]:
    """One run with so many kills: a line about it, and what was wrong."""
    plan = PLANS[number % len(PLANS)]
    keep: int | str = "memory" if number % KEEPS_IN_MEMORY == 1 else 2
    if plan not in references:
        references[plan] = train_undisturbed(short_job(folder / f"reference-{number}", plan))
    parents = _draw_parents(seed, min(wanted - 1, PARENT_KILLS)) if number % 2 else []
    out = folder / str(number)
    kills = draw_kills(seed, wanted - len(parents), STEPS)
    run, done, problems = train_disturbed(short_job(out / "ranks", plan, keep=keep), kills)
    if len(done) < len(kills):
        problems.append(f"only {len(done)} of {len(kills)} kills hit a rank")
    problems += differences(run, references[plan])
    if parents:
        resumed, wrong = train_with_resumes(short_job(out / "parents", plan, keep=keep), parents)
        problems += [f"with kills of the parent: {text}" for text in wrong]
        problems += [f"after --resume: {text}" for text in differences(resumed, references[plan])]
    return f"{plan} keep={keep}: {' '.join(map(str, (*done, *parents)))}", problems


def _draw_parents(seed: str, number: int) -> list[ParentKill]:
    random_ = random.Random(f"parent {seed}")
    steps = sorted(random_.randrange(STEPS - 1) for _ in range(number))
    return [ParentKill(step, (0.05 if step else 4.0) * random_.random()) for step in steps]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other moments")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="only every N-th run, from the I-th")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
