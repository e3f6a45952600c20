"""echelon schedule: the figures, what is drawn, and every way to ask for what has no meaning."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from echelon.bench import rehearsal
from echelon.cli.main import run
from echelon.launching import Ranks
from echelon.program import build, load_schedule, show


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["schedule", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def result(capsys: pytest.CaptureFixture[str], name: str, *arguments: str) -> dict[str, Any]:
    code, out, err = output(capsys, name, "--stages", "4", "--microbatches", "8", *arguments, "--json")
    assert (code, err) == (0, "")
    given: dict[str, Any] = json.loads(out)
    return given


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
    given = result(capsys, *arguments)
    assert given["bubble_fraction"] == pytest.approx(bubble, abs=1e-12)
    assert given["in_flight"] == in_flight
    assert given["versions"] == versions
    assert (given["schedule"], given["stages"], given["microbatches"]) == (arguments[0], 4, 8)
    assert ("3 batches" in given["bubble_of"]) == arguments[0].startswith("pipedream")


def test_costs_change_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    given = result(
        capsys, "1f1b", "--forward", "0.5,1,1,1", "--backward", "2", "--transfer", "0.1", "--update", "1"
    )
    assert given["busy_seconds"] == [8 * 2.5 + 1, 25, 25, 25]
    assert given["seconds"] > 8 * 3 + 3 * 3 + 1
    halves = result(capsys, "zero-bubble", "--backward-input", "1", "--backward-weight", "0")
    assert halves["busy_seconds"] == [16] * 4


def test_replicated_stages(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, "1f1b", "--replicas", "3-1", "--microbatches", "6", "--json")
    given = json.loads(out)
    assert code == 0
    assert given["placement"] == [[0, 1, 2], [3]]
    assert given["in_flight"] == [2, 2, 2, 1]


def test_a_person_sees_the_bubble_the_table_and_the_grid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = output(capsys, "1f1b", "--stages", "2", "--microbatches", "2")
    assert (code, err) == (0, "")
    assert "bubble 1/3 = 33.3% of one step" in out
    assert "rank 0  F0 F1 ·  B0 ·  B1\nrank 1  ·  F0 B0 F1 B1 ·\n" in out
    code, out, _ = output(capsys, "1f1b", "--stages", "2", "--microbatches", "500")
    assert "more parts like these are left out: --out FILE.svg" in out
    assert out.count("\n") < 90
    code, out, _ = output(capsys, "1f1b", "--stages", "70", "--microbatches", "3")
    assert "in flight at most 3" in out


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
    given = json.loads(out)
    assert (given["schedule"], given["stages"], given["microbatches"]) == ("zero-bubble", 3, 4)


def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    for path in (svg, png):
        assert output(capsys, "1f1b", "--stages", "2", "--microbatches", "2", "--out", str(path))[0] == 0
    assert svg.read_text().startswith("<svg")
    assert "1f1b: 2 stages, 2 microbatches" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


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
        (["1f1b", "--stages", "0", "--microbatches", "0"], ["2 errors", "pipeline=0", "microbatches=0"]),
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
            ["4 errors", "--forward x", "--update -1", "--out a.gif", "pipeline=0"],
        ),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--backward", "1,2,3"], ["3 numbers for 2 stages"]),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--transfer", "1,2"], ["must be one number"]),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--forward", "1e999999999"], ["must be seconds"]),
        (["1f1b", "--stages", "2", "--microbatches", "2", "--out", "/nowhere/a.svg"], ["cannot be written"]),
        (["nowhere/a.txt"], ["cannot be read"]),
        (["nowhere/a.txt", "--forward", "x"], ["--forward x"]),
    ],
)
def test_what_has_no_meaning_is_exit_2_with_every_reason(
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
def test_a_faulty_file_is_exit_2_with_the_line_the_grid_and_the_reason(
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


# --- measured -----------------------------------------------------------------------------------------


@pytest.fixture
def _measuring(warm_ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "Ranks", lambda count: nullcontext(warm_ranks(count)))


@pytest.mark.usefixtures("_measuring")
@pytest.mark.parametrize(
    ("arguments", "costs"),
    [
        (["1f1b", "--stages", "2"], {"forward", "backward", "update"}),
        (["zero-bubble", "--stages", "2"], {"forward", "backward_input", "backward_weight", "update"}),
        (["pipedream", "--stages", "2"], {"forward", "backward", "update"}),
    ],
)
def test_the_measured_bubble_stands_beside_that_of_the_measured_costs(
    capsys: pytest.CaptureFixture[str], arguments: list[str], costs: set[str]
) -> None:
    code, out, err = output(capsys, *arguments, "--microbatches", "2", "--measure", "--json")
    assert (code, err) == (0, "")
    given = json.loads(out)
    assert 0 < given["bubble_fraction"] < 1
    assert 0 < given["bubble_measured"] < 1
    assert given["bubble_measured"] in given["bubbles_measured"]
    assert set(given["costs_measured"]) == costs | {"transfer"}
    assert all(seconds > 0 for seconds in given["costs_measured"]["forward"])
    assert given["seconds_measured"] > given["batches"] * 2 * min(given["costs_measured"]["forward"])
    assert given["model"]["layers"] == 4


@pytest.mark.usefixtures("_measuring")
def test_what_was_measured_is_drawn_above_the_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file, out = tmp_path / "mine.txt", tmp_path / "a.svg"
    file.write_text("rank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1\n")
    code, told, err = output(capsys, str(file), "--measure", "--out", str(out))
    assert (code, err) == (0, "")
    assert "measured (median of 9 turns)" in told
    assert "simulated with the measured costs" in told
    assert "a GPT of 4 blocks on 2 ranks of this machine" in told
    assert [told.count(f"rank {rank}") for rank in (0, 1)] == [2, 2]
    picture = out.read_text()
    assert "2 stages, 2 microbatches: measured" in picture
    assert picture.index(": measured") < picture.index("simulated with the measured costs")
    assert [picture.count(f">{name}<") for name in ("F0", "B1", "rank 1")] == [4, 4, 2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--stages", "2", "--update", "1", "--text"],
            ["2 errors", "--update with", "--text with --measure"],
        ),
        (["--stages", "2", "--backward-input", "0"], ["--backward-input with --measure"]),
        (["--stages", "40"], ["2 errors", "40 ranks", "1600 forwards: at most 1000"]),
        (["--stages", "1"], ["1 ranks: it needs 2 to 16"]),
    ],
)
def test_what_cannot_be_measured_is_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: list[str]
) -> None:
    code, out, err = output(capsys, "gpipe", "--microbatches", "40", *arguments, "--measure")
    assert (code, out) == (2, "")
    for part in says:
        assert part in err


def test_measuring_under_torchrun_and_versions_from_a_file_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.txt"
    assert output(capsys, "pipedream", "--stages", "2", "--microbatches", "2", "--out", str(file))[0] == 0
    monkeypatch.setattr("echelon.cli.schedule_measure.is_under_torchrun", lambda: True)
    code, _, err = output(capsys, str(file), "--measure")
    assert code == 2
    assert "without torchrun" in err
    assert "keeps weight versions" in err
