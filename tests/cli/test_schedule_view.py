"""How echelon schedule shows a program: figures, table, grid, pictures."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from echelon.cli.schedule_view import ScheduleRequest, SimulatedSchedule
from echelon.launching import Ranks
from echelon.program import Costs, build, simulate
from echelon.train import rehearsal
from tests.cli.schedule_output import output

REQUEST = ScheduleRequest(build("interleaved", (1, 1), 2, 2), "interleaved", 2, 2, 2)


def test_the_summary_has_the_figures_of_the_timeline() -> None:
    line = simulate(REQUEST.program, Costs(forward=1, backward=2, update=3))
    figures = SimulatedSchedule(REQUEST, line).summary()
    assert figures["bubble_fraction"] == float(line.bubble_fraction)
    assert figures["seconds"] == float(line.makespan)
    assert figures["busy_seconds"] == [2 * 2 * 3 + 3] * 2
    assert figures["placement"] == [[0], [1], [0], [1]]
    assert figures["instructions"] == sum(map(len, REQUEST.program.ranks))


def test_the_headline_names_chunks_and_batches() -> None:
    assert REQUEST.headline == "interleaved: 2 stages, 2 chunks per rank, 2 microbatches"
    batches = ScheduleRequest(REQUEST.program, "pipedream", 3, 4, 1, batches=3)
    assert batches.headline == "pipedream: 3 stages, 3 batches of 4 microbatches"
    assert batches.bubble_of == "3 batches, with one fill and one drain"


def test_a_panel_has_the_spans_and_what_each_rank_keeps() -> None:
    (drawn,) = SimulatedSchedule(REQUEST, simulate(REQUEST.program)).panels()
    assert "in flight 4, 4" in drawn.about
    assert "versions" not in drawn.about
    assert len(drawn.shown) == 2 * 2 * 2 * 2  # zero-cost instructions have no box


def test_a_person_sees_the_bubble_the_table_and_the_grid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = output(capsys, "1f1b", "--stages", "2", "--microbatches", "2")
    assert (code, err) == (0, "")
    assert "bubble 1/3 = 33.3% of one step" in out
    assert "rank 0  F0 F1 ·  B0 ·  B1\nrank 1  ·  F0 B0 F1 B1 ·\n" in out
    code, out, _ = output(capsys, "1f1b", "--stages", "2", "--microbatches", "500")
    assert "more parts are left out: --out FILE.svg" in out
    assert out.count("\n") < 90
    code, out, _ = output(capsys, "1f1b", "--stages", "70", "--microbatches", "3")
    assert "in flight at most 3" in out


def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    for path in (svg, png):
        assert output(capsys, "1f1b", "--stages", "2", "--microbatches", "2", "--out", str(path))[0] == 0
    assert svg.read_text().startswith("<svg")
    assert "1f1b: 2 stages, 2 microbatches" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def _measuring(warm_ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "Ranks", lambda count: nullcontext(warm_ranks(count)))


@pytest.mark.slow
@pytest.mark.usefixtures("_measuring")
@pytest.mark.parametrize(
    ("arguments", "costs"),
    [
        (["1f1b", "--stages", "2"], {"forward", "backward", "update"}),
        pytest.param(
            ["zero-bubble", "--stages", "2"],
            {"forward", "backward_input", "backward_weight", "update"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["pipedream", "--stages", "2"], {"forward", "backward", "update"}, marks=pytest.mark.slow
        ),
    ],
)
def test_the_measured_bubble_stands_beside_that_of_the_measured_costs(
    capsys: pytest.CaptureFixture[str], arguments: list[str], costs: set[str]
) -> None:
    code, out, err = output(capsys, *arguments, "--microbatches", "2", "--measure", "--json")
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert 0 < summary["bubble_fraction"] < 1
    assert 0 < summary["bubble_measured"] < 1
    assert summary["bubble_measured"] in summary["bubbles_measured"]
    assert set(summary["costs_measured"]) == costs | {"transfer"}
    assert all(seconds > 0 for seconds in summary["costs_measured"]["forward"])
    assert summary["seconds_measured"] > summary["batches"] * 2 * min(summary["costs_measured"]["forward"])
    assert summary["model"]["layers"] == 4


@pytest.mark.slow
@pytest.mark.usefixtures("_measuring")
def test_what_was_measured_is_drawn_above_the_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file, out = tmp_path / "mine.txt", tmp_path / "a.svg"
    file.write_text("rank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1\n")
    code, shown, err = output(capsys, str(file), "--measure", "--out", str(out))
    assert (code, err) == (0, "")
    assert "measured (median of 9 turns)" in shown
    assert "simulated with the measured costs" in shown
    assert "a GPT of 4 blocks on 2 ranks of this machine" in shown
    assert [shown.count(f"rank {rank}") for rank in (0, 1)] == [2, 2]
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
    monkeypatch.setattr("echelon.cli.schedule_view.is_under_torchrun", lambda: True)
    code, _, err = output(capsys, str(file), "--measure")
    assert code == 2
    assert "without torchrun" in err
    assert "weight versions cannot run" in err
