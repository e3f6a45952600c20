"""The program of a plan's step, and files that do not fit the plan."""

from pathlib import Path

import pytest

from echelon.engine.step_program import step_program
from echelon.errors import UserError
from echelon.plan import Plan
from echelon.program import Op


def ops(plan: str, *, ties: bool = False, microbatches: int | None = None) -> str:
    program = step_program(Plan.parse(plan), ties=ties, microbatches=microbatches)
    return " ".join(f"{i.op.value}{'' if i.microbatch is None else i.microbatch}" for i in program.ranks[0])


def test_a_schedule_by_name_is_lowered_as_the_plan_says() -> None:
    assert ops("schedule=gpipe microbatches=2") == "F0 F1 B0 B1 REDUCE NORM UPDATE PUBLISH"
    assert ops("microbatches=2", ties=True, microbatches=1) == "F0 B0 REDUCE TIE NORM UPDATE PUBLISH"
    gathered = ops("data=2 zero=3")
    assert gathered == "GATHER F0 FREE GATHER B0 FREE REDUCE NORM UPDATE PUBLISH"
    assert Op.GATHER.value not in ops("data=2 zero=2")


END = "REDUCE UPDATE"


@pytest.mark.parametrize(
    ("plan", "text", "reason"),
    [
        ("pipeline=2 microbatches=2", "rank 0: F0 B0\nrank 1: F0 B0\n", "set microbatches=1"),
        ("microbatches=1", "rank 0: F0 B0 F1 B1\n", "set microbatches=2"),
        ("pipeline=3", "rank 0: F0 B0\nrank 1: F0 B0\n", "set pipeline=1-1"),
        ("data=2 zero=3", "rank 0: F0 I0 W0\n", "use zero=2"),
        ("compile=true", "rank 0: F0 I0 W0\n", "drop compile"),
        ("microbatches=2", f"rank 0: F0 B0 {END} F1 B1 {END}\n", "one REDUCE for each stage"),
        ("microbatches=1", f"rank 0: F0 B0 {END} UPDATE\n", "then one UPDATE, at the end"),
        ("microbatches=2", f"rank 0: F0 B0 REDUCE F1 B1 {END}\n", "one REDUCE for each stage"),
    ],
)
def test_a_file_that_does_not_fit_the_plan_is_refused(
    tmp_path: Path, plan: str, text: str, reason: str
) -> None:
    file = tmp_path / "own.txt"
    file.write_text(text)
    with pytest.raises(UserError, match=reason):
        step_program(Plan.parse(f"{plan} schedule={file}"), ties=False)


def test_a_file_that_fits_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("rank 0: F1 F0 B1 B0\n")
    assert ops(f"microbatches=2 schedule={file}").startswith("F1 F0 B1 B0 REDUCE")
    assert ops(f"microbatches=2 data=2 zero=3 schedule={file}").startswith("GATHER F1 FREE GATHER F0")
