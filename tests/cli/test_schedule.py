"""echelon schedule: the figures of every schedule, files, and every invalid argument."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.schedule import out_errors
from echelon.plan import SCHEDULES
from echelon.program import build, load_schedule, show
from tests.cli.schedule_output import output


def result(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> dict[str, Any]:
    code, out, err = output(capsys, name, "--stages", "4", "--microbatches", "8", *arguments, "--json")
    assert (code, err) == (0, "")
    summary: dict[str, Any] = json.loads(out)
    return summary


@pytest.mark.parametrize(
    ("arguments", "bubble", "in_flight", "versions"),
    [
        (["1f1b"], 3 / 11, [4, 3, 2, 1], [1, 1, 1, 1]),
        (["gpipe"], 3 / 11, [8, 8, 8, 8], [1, 1, 1, 1]),
        (["naive"], 3 / 4, [1, 1, 1, 1], [1, 1, 1, 1]),
        (["interleaved", "--chunks", "2"], 3 / 19, [11, 9, 7, 5], [1, 1, 1, 1]),
        (["zero-bubble"], 3 / 19, [4, 4, 4, 4], [1, 1, 1, 1]),
        (["pipedream"], 3 / 27, [4, 3, 2, 1], [4, 3, 2, 1]),
        (["pipedream-vertical"], 3 / 27, [4, 3, 2, 1], [4, 4, 4, 4]),
        (["pipedream-2bw"], 3 / 27, [4, 3, 2, 1], [2, 2, 2, 2]),
    ],
)
def test_the_figures_of_each_schedule(
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    bubble: float,
    in_flight: list[int],
    versions: list[int],
) -> None:
    summary = result(capsys, *arguments)
    assert summary["bubble_fraction"] == pytest.approx(bubble, abs=1e-12)
    assert summary["in_flight"] == in_flight
    assert summary["versions"] == versions
    assert (summary["schedule"], summary["stages"], summary["microbatches"]) == (arguments[0], 4, 8)
    assert ("3 batches" in summary["bubble_of"]) == arguments[0].startswith("pipedream")


def test_costs_change_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    summary = result(
        capsys, "1f1b", "--forward", "0.5,1,1,1", "--backward", "2", "--transfer", "0.1", "--update", "1"
    )
    assert summary["busy_seconds"] == [8 * 2.5 + 1, 25, 25, 25]
    assert summary["seconds"] > 8 * 3 + 3 * 3 + 1
    halves = result(capsys, "zero-bubble", "--backward-input", "1", "--backward-weight", "0")
    assert halves["busy_seconds"] == [16] * 4


def test_replicated_stages(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "1f1b", "--replicas", "3-1", "--microbatches", "6", "--json")
    summary = json.loads(out)
    assert code == 0
    assert summary["placement"] == [[0, 1, 2], [3]]
    assert summary["in_flight"] == [2, 2, 2, 1]


def test_text_is_the_program_and_can_be_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = output(capsys, "zero-bubble", "--stages", "3", "--microbatches", "4", "--text")
    program = build("zero-bubble", (1,) * 3, 4)
    assert (code, out) == (0, show(program))
    file = tmp_path / "mine.txt"
    code, out, _ = output(
        capsys, "zero-bubble", "--stages", "3", "--microbatches", "4", "--out", str(file), "--text", "--json"
    )
    assert load_schedule(file) == program
    assert json.loads(out)["text"] == show(program)
    code, out, _ = output(capsys, str(file), "--json", "--stages", "3")
    summary = json.loads(out)
    assert (summary["schedule"], summary["stages"], summary["microbatches"]) == ("zero-bubble", 3, 4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["1f1c"], ["3 errors", "did you mean '1f1b'?", "--stages is missing", "--microbatches is missing"]),
        (["interleaved", "--stages", "4", "--microbatches", "6", "--chunks", "2"], ["multiple of 4"]),
        (
            ["interleaved", "--stages", "4", "--microbatches", "6"],
            ["2 errors", "multiple of 4", "chunks=2 or more"],
        ),
        (["1f1b", "--stages", "4", "--microbatches", "8", "--chunks", "2"], ["use schedule=interleaved"]),
        (["pipedream-2bw", "--stages", "4", "--microbatches", "3"], ["microbatches=4 or more"]),
        (["interleaved", "--replicas", "3-1", "--microbatches", "4", "--chunks", "2"], ["same ranks"]),
        (["pipedream", "--replicas", "3-1", "--microbatches", "4"], ["different weight versions"]),
        (
            ["1f1b", "--replicas", "3-1", "--stages", "3", "--microbatches", "4"],
            ["--replicas 3-1 --stages 3"],
        ),
        (["1f1b", "--replicas", "3-x", "--microbatches", "4"], ["pipeline=3-x"]),
        (["1f1b", "--stages", "0", "--microbatches", "0"], ["2 errors", "--stages 0", "--microbatches 0"]),
        (["1f1b", "--stages", "9999", "--microbatches", "9999"], ["too many to show"]),
        (
            [
                "naive",
                "--stages",
                "0",
                "--microbatches",
                "2",
                "--forward",
                "x",
                "--update",
                "-1",
                "--out",
                "a.gif",
            ],
            ["4 errors", "--forward x", "--update -1", "--out a.gif", "--stages 0"],
        ),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--backward", "1,2,3"], ["3 numbers for 2 stages"]),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--transfer", "1,2"], ["must be one number"]),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--forward", "1e999999999"], ["must be seconds"]),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--out", "/nowhere/a.svg"], ["no folder /nowhere"]),
        (["nowhere/a.txt"], ["cannot be read"]),
        (["nowhere/a.txt", "--forward", "x"], ["--forward x"]),
    ],
)
def test_invalid_arguments_are_exit_2_with_every_reason(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: list[str]
) -> None:
    code, out, err = output(capsys, *arguments)
    assert (code, out) == (2, "")
    for part in says:
        assert part in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "rank 0: F0 SA0>1 B0\nrank 1: F0 B0\n",
            ["line 1, rank 0, SA0>1: rank 1 never receives it", "[SA0]"],
        ),
        (
            "# one\nrank 0: F0 B0 F1\n",
            ["line 2, rank 0, F1: the backward of microbatch 1", "rank 0  F0   B0   [F1]"],
        ),
        (
            "rank 0: F0 B0 UPDAET\n",
            ["line 1: 'UPDAET': unknown word (did you mean 'UPDATE'?)", "F0       B0       [UPDAET]"],
        ),
    ],
)
def test_an_invalid_file_is_exit_2_with_the_line_the_grid_and_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: list[str]
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(text)
    code, out, err = output(capsys, str(file))
    assert (code, out) == (2, "")
    for part in says:
        assert part in err
    code, out, _ = output(capsys, str(file), "--json")
    assert json.loads(out)["errors"]


def test_options_that_differ_from_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text("rank 0: F0 B0\n")
    code, _, err = output(capsys, str(file), "--stages", "2", "--microbatches", "3")
    assert code == 2
    assert "--stages 2: the file says 1" in err
    assert "--microbatches 3: the file says 1" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--stages", "１", "--microbatches", "4"], "--stages １: must be an integer from 1 to 999999"),
        (["--stages", "2", "--microbatches", "1e3"], "--microbatches 1e3: must be an integer"),
        (["--stages", "9" * 20, "--microbatches", "4"], "must be an integer from 1 to 999999"),
        (["--stages", "2", "--microbatches", "4", "--forward", "１"], "--forward １: must be seconds"),
        (["--replicas", "３-1", "--microbatches", "4"], "pipeline=３-1: numbers must be written with the"),
        (["--replicas", "9999999-1", "--microbatches", "4"], "must be below 1,000,000"),
        (["--stages", "2", "--microbatches", "4", "--measure", "--out", "no/x.svg"], "there is no folder no"),
    ],
)
def test_what_only_looks_like_a_number_or_a_place(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    # typer answered with pydantic's sentences, and --measure ran before --out was looked at.
    code, out, err = output(capsys, "1f1b", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert "Input should be" not in err


def test_the_help_lists_all_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = output(capsys, "--help")
    assert all(name in " ".join(out.split()) for name in SCHEDULES)


@pytest.mark.parametrize("name", ["new.svg", "there.png", "a.txt"])
def test_a_file_that_can_be_written_is_not_made_by_asking(tmp_path: Path, name: str) -> None:
    (tmp_path / "there.png").write_bytes(b"old")
    assert out_errors(tmp_path / name) == []
    assert [path.name for path in tmp_path.iterdir()] == ["there.png"]


def test_places_that_cannot(tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "is a folder; give a file in it" in out_errors(tmp_path / "folder.svg")[0]
    assert "there is no folder" in out_errors(tmp_path / "no" / "x.svg")[0]
    assert "cannot be written" in out_errors(tmp_path / "file" / "x.svg")[0]
    assert len(out_errors(tmp_path / "no" / "x.pdf")) == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(options: list[str]) -> None:
    """As `| head -1`: the other end of the pipe is closed before all is written."""
    command = [sys.executable, "-m", "echelon", "schedule", "1f1b", "--stages", "8", "--microbatches", "64"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*command, *options], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
