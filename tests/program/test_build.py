"""Whole programs by name: one stage, several, with gathers and tied weights."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.plan import ASYNCHRONOUS_SCHEDULES, SCHEDULES, Plan
from echelon.planner import read_profile
from echelon.program import (
    Op,
    add_gathers,
    add_transfers,
    build,
    check,
    forward_only,
    load_schedule,
    show,
)
from echelon.program.build import read_text_file, step_program
from echelon.train.jobs.job_file import read_job


def lines(text: str) -> list[str]:
    return [line.partition(": ")[2] for line in text.splitlines() if line.startswith("rank")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("naive", "F0 B0 F1 B1 F2 B2 F3 B3 REDUCE NORM UPDATE PUBLISH"),
        ("gpipe", "F0 F1 F2 F3 B0 B1 B2 B3 REDUCE NORM UPDATE PUBLISH"),
        ("1f1b", "F0 B0 F1 B1 F2 B2 F3 B3 REDUCE NORM UPDATE PUBLISH"),
        ("zero-bubble", "F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 REDUCE NORM UPDATE PUBLISH"),
        ("pipedream", " ".join(f"F{k}v{k} B{k}v{k} REDUCE NORM UPDATE PUBLISH" for k in range(4))),
        ("pipedream-2bw", "F0v0 B0v0 F1v0 B1v0 F2v0 B2v0 F3v0 B3v0 REDUCE NORM UPDATE PUBLISH"),
    ],
)
def test_a_model_in_one_stage_has_the_program_of_its_schedule(name: str, expected: str) -> None:
    program = build(name, (1,), 4)
    assert lines(show(program)) == [expected]
    check(program)


def test_one_stage_gathers_its_weights_for_each_use() -> None:
    assert lines(show(build("gpipe", (1,), 2, gather=True))) == [
        "GATHER F0 FREE GATHER F1 FREE GATHER B0 FREE GATHER B1 FREE REDUCE NORM UPDATE PUBLISH"
    ]
    evaluation = add_gathers(add_transfers(forward_only(((0,),), 2)))
    assert lines(show(evaluation)) == ["GATHER F0 FREE GATHER F1 FREE"]
    check(evaluation, training=False)


def test_tied_weights_are_summed_by_every_rank_between_reduce_and_norm() -> None:
    program = build("interleaved", (1, 1), 2, 2, ties=True)
    assert [line.partition("REDUCE")[2] for line in lines(show(program))] == [
        "@0 REDUCE@2 TIE NORM UPDATE PUBLISH",
        "@1 REDUCE@3 TIE NORM UPDATE PUBLISH",
    ]
    check(program)


@pytest.mark.parametrize("name", ASYNCHRONOUS_SCHEDULES)
def test_stages_that_update_at_different_times_cannot_be_tied(name: str) -> None:
    with pytest.raises(UserError, match=f"schedule={name}: tied stages would update at different times"):
        build(name, (1, 1), 2, ties=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_asynchronous_schedules_have_weight_versions(name: str) -> None:
    program = build(name, (1, 1), 2, 2 if name == "interleaved" else 1)
    assert program.versioned == (name in ASYNCHRONOUS_SCHEDULES)


def ops(plan: str, *, ties: bool = False, microbatches: int | None = None) -> str:
    program = step_program(Plan.parse(plan), ties=ties, microbatches=microbatches)
    return " ".join(f"{i.op.value}{'' if i.microbatch is None else i.microbatch}" for i in program.ranks[0])


def test_a_schedule_by_name_is_lowered_as_the_plan_says() -> None:
    assert ops("schedule=gpipe microbatches=2") == "F0 F1 B0 B1 REDUCE NORM UPDATE PUBLISH"
    assert ops("microbatches=2", ties=True, microbatches=1) == "F0 B0 REDUCE TIE NORM UPDATE PUBLISH"
    gathered = ops("data=2 zero=3")
    assert gathered == "GATHER F0 FREE GATHER B0 FREE REDUCE NORM UPDATE PUBLISH"
    assert Op.GATHER.value not in ops("data=2 zero=2")


def test_a_program_is_of_one_pipeline_however_many_there_are() -> None:
    few = step_program(Plan.parse("pipeline=16 microbatches=64"), ties=True)
    many = step_program(Plan.parse("data=128 tensor=8 pipeline=16 microbatches=64"), ties=True)
    assert many == few
    assert len(many.ranks) == 16


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


@pytest.mark.parametrize(
    ("text", "plan", "reason"),
    [
        (
            "rank 0: F0 B0\nrank 1: F0 B0\n",
            "pipeline=3",
            "replicas 1-1, and the plan has pipeline=1-1-1; set pipeline=1-1",
        ),
        (
            "rank 0: F0 B0\nrank 1: F0 B0\n",
            "pipeline=2 microbatches=4",
            "for 1 microbatches, .* has 4; set",
        ),
        ("rank 0: F0 B0\nrank 1: B0 F0\n", "pipeline=2", r"line 2, rank 1"),
        (
            show(build("pipedream", (1, 1), 2)),
            "pipeline=2 microbatches=2",
            "keeps weight versions, .*; leave",
        ),
        (
            show(build("zero-bubble", (1, 1), 2)),
            "pipeline=2 microbatches=2 compile=true",
            "backwards in two, .*; drop compile",
        ),
        ("rank 0: F0 Q0\n", "pipeline=2", "line 1"),
    ],
)
def test_a_file_for_several_ranks_that_does_not_fit_is_refused(
    tmp_path: Path, text: str, plan: str, reason: str
) -> None:
    file = tmp_path / "own.txt"
    file.write_text(text)
    with pytest.raises(UserError, match=reason):
        step_program(Plan.parse(f"{plan} schedule={file}"), ties=False)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        step_program(Plan.parse(f"pipeline=2 schedule={tmp_path / 'none.txt'}"), ties=False)


def test_all_errors_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("rank 0: F0 I0 W0\n")
    plan = f"pipeline=2 microbatches=2 zero=3 data=2 compile=true schedule={file}"
    with pytest.raises(UserError) as caught:
        step_program(Plan.parse(plan), ties=False)
    assert len(caught.value.errors) == 4


def test_a_file_may_say_when_each_stage_is_reduced(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("rank 0: F0 B0 REDUCE UPDATE\n")
    assert ops(f"schedule={file}") == "F0 B0 REDUCE NORM UPDATE PUBLISH"
    file.write_text("rank 0: F0 REDUCE B0 UPDATE\n")
    with pytest.raises(UserError):
        ops(f"schedule={file}")


def test_a_rank_with_several_stages_is_one_position_of_the_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text(show(build("interleaved", (1, 1), 2, 2)))
    program = step_program(Plan.parse(f"pipeline=2 microbatches=2 schedule={file}"), ties=False)
    assert (program.stages, len(program.ranks)) == (4, 2)
    with pytest.raises(UserError, match="set pipeline=1-1"):
        step_program(Plan.parse(f"pipeline=4 microbatches=2 schedule={file}"), ties=False)


def test_a_file_with_replicas_needs_a_plan_with_them(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text(show(build("1f1b", (2, 1), 2)))
    program = step_program(Plan.parse(f"pipeline=2-1 microbatches=2 schedule={file}"), ties=False)
    assert program.placement == ((0, 1), (2,))
    with pytest.raises(UserError, match="replicas 2-1, and the plan has pipeline=1-1-1; set pipeline=2-1"):
        step_program(Plan.parse(f"pipeline=3 microbatches=2 schedule={file}"), ties=False)


ORDER = "# gpipe\nrank 0: F0 F1 B0 B1\nrank 1: F0 F1 B0 B1\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.txt"


def test_an_order_of_computation_is_completed(file: Path) -> None:
    file.write_text(ORDER)
    program = load_schedule(file)
    assert program.name == str(file)
    assert program.ranks == build("gpipe", (1, 1), 2).ranks


def test_reductions_alone_are_added_where_sends_are_there(file: Path) -> None:
    file.write_text("schedule: mine\nrank 0: F0 SA0>1 RG0<1 B0\nrank 1: RA0<0 F0 B0 SG0>0\n")
    program = load_schedule(file)
    assert program.name == "mine"
    assert program.ranks == build("1f1b", (1, 1), 1).ranks


def test_transfers_alone_are_added_where_reductions_are_there(file: Path) -> None:
    file.write_text("rank 0: F0 B0 REDUCE UPDATE\nrank 1: F0 B0 REDUCE UPDATE\n")
    assert load_schedule(file).ranks == build("1f1b", (1, 1), 1).ranks


@pytest.mark.parametrize(
    ("end", "ties", "completed"),
    [
        ("", False, "REDUCE NORM UPDATE PUBLISH"),
        ("", True, "REDUCE TIE NORM UPDATE PUBLISH"),
        ("REDUCE UPDATE", False, "REDUCE NORM UPDATE PUBLISH"),
        ("REDUCE UPDATE", True, "REDUCE TIE NORM UPDATE PUBLISH"),
        ("REDUCE NORM UPDATE", True, "REDUCE TIE NORM UPDATE PUBLISH"),
        ("REDUCE TIE UPDATE PUBLISH", False, "REDUCE TIE NORM UPDATE PUBLISH"),
    ],
)
def test_what_the_update_lacks_is_added(file: Path, end: str, ties: bool, completed: str) -> None:
    file.write_text(f"schedule: mine\nrank 0: F0 B0 {end}\n")
    assert show(load_schedule(file, ties=ties)) == f"schedule: mine\nrank 0: F0 B0 {completed}\n"


@pytest.mark.parametrize("end", ["REDUCE", "NORM", "UPDATE"])
def test_a_file_with_a_reduce_or_an_update_must_have_both(file: Path, end: str) -> None:
    file.write_text(f"rank 0: F0 B0 {end}\n")
    with pytest.raises(UserError, match=r"no REDUCE of stage 0|no UPDATE behind it"):
        load_schedule(file)


def test_a_whole_program_is_taken_as_it_is(file: Path) -> None:
    program = build("interleaved", (1, 1), 4, 2)
    file.write_text(show(program))
    assert load_schedule(file) == program


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "rank 0: F0 B0\nrank 1: F0 X0 B0\n",
            ["1 error in schedule", "line 2: 'X0': unknown word", "rank 1  F0   [X0] B0"],
        ),
        ("rank 0: F0\nrank 1: " + "?" * 5000, ["line 2: ", f"[{'?' * 16}]\n"]),
        (
            "\nrank 0: F0 SA0>1 RG0<1 B0\nrank 1: F0 B0 SG0>0\n",
            [
                "line 2, rank 0, SA0>1: rank 1 never receives it",
                "line 3, rank 1, F0: needs RA0",
                "[SA0]",
                "time",
            ],
        ),
        (
            "rank 0: F0 F1 B1\n",
            ["line 1, rank 0, F0: the backward of microbatch 0 at stage 0 is missing", "[F0]"],
        ),
        (
            "rank 0: F0 B0 F1 B1\nrank 1: F0 F1 B0 B1\n",
            ["line 1, rank 0, RG0<1: deadlock", "line 2, rank 1", "[RG0]"],
        ),
        ("", ["no rank: write a line for each"]),
    ],
)
def test_errors_name_the_line_and_show_the_grid(file: Path, text: str, says: list[str]) -> None:
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_schedule(file)
    for part in says:
        assert part in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        load_schedule(tmp_path / "none.txt")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        load_schedule(tmp_path)
    (tmp_path / "odd.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not UTF-8"):
        load_schedule(tmp_path / "odd.txt")


@pytest.mark.parametrize("read", [read_profile, load_schedule, read_job])
def test_a_file_without_an_end_is_not_read(tmp_path: Path, read: Callable[[Path], object]) -> None:
    path = tmp_path / "given.toml"
    path.touch()
    os.truncate(path, 2**42)  # takes no room on the disk
    with pytest.raises(UserError, match=r"cannot be read: it has more than 33554432 characters"):
        read(path)


def test_the_longest_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["echelon.program.build"], "MOST_CHARACTERS", 3)
    (tmp_path / "a").write_text("äöü", encoding="utf-8")
    assert read_text_file(tmp_path / "a") == "äöü"
    (tmp_path / "a").write_text("äöüß", encoding="utf-8")
    with pytest.raises(OSError, match="more than 3 characters"):
        read_text_file(tmp_path / "a")
