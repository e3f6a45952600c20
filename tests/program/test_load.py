"""Schedule files: completed with what they leave out, checked, and rejected with the line."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.planner import read_profile
from echelon.program import build, load, load_schedule, show
from echelon.train.jobs.job_file import read_job

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
    monkeypatch.setattr(load, "MOST_CHARACTERS", 3)
    (tmp_path / "a").write_text("äöü", encoding="utf-8")
    assert load.read_text_file(tmp_path / "a") == "äöü"
    (tmp_path / "a").write_text("äöüß", encoding="utf-8")
    with pytest.raises(OSError, match="more than 3 characters"):
        load.read_text_file(tmp_path / "a")
