"""The table of injected bugs in docs/verify.md, as data: each bug is tested with the command named there."""

import argparse
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

from echelon.plan import Plan
from echelon.train.jobs.job_file import read_job
from echelon.verify import Case
from echelon.verify.job_case import case_of
from tests.cases import Branching, adamw, mean_loss, signed_vectors

PAGE = Path(__file__).parents[1] / "docs" / "verify.md"
SMALL = ("model.layers=2", "model.width=32", "model.heads=2")


class Row(NamedTuple):
    """`settings` of the job; `changes_gradients`: so that an audit of them finds the bug too."""

    bug: str
    plan: str
    settings: tuple[str, ...]
    changes_gradients: bool

    def case(self, steps: int) -> Case:
        """The training of the command, with a smaller model."""
        if self.bug == "used-here-only":  # the models of jobs use all of their parameters
            return Case(Branching, signed_vectors, mean_loss, adamw, steps)
        sizes = () if "task=images" in self.settings else SMALL
        return case_of(read_job(None, [*self.settings, *sizes], self.plan), Plan.parse(self.plan), steps)


@cache
def rows() -> dict[str, Row]:
    """By the name of the bug."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("| `--inject-bug` |"))
    found = {}
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        bug, _, _, command, _, gradients = (cell.strip() for cell in line.strip("|").split(" | "))
        options = _parse(command.strip("`"))
        row = Row(bug.strip("`"), options.plan, tuple(options.set), changes_gradients=gradients == "differ")
        found[row.bug] = row
    return found


def _parse(command: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--plan")
    parser.add_argument("--set", action="append", default=[])
    return parser.parse_args(shlex.split(command))
