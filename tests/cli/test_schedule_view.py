"""How echelon schedule shows a program: figures, table, grid, pictures."""

from pathlib import Path

import pytest

from echelon.cli.schedule_view import ScheduleRequest, headline, panel, summary
from echelon.program import Costs, build, simulate
from tests.cli.schedule_output import output

REQUEST = ScheduleRequest(build("interleaved", (1, 1), 2, 2), "interleaved", 2, 2, 2)


def test_the_summary_has_the_figures_of_the_timeline() -> None:
    line = simulate(REQUEST.program, Costs(forward=1, backward=2, update=3))
    figures = summary(REQUEST, line)
    assert figures["bubble_fraction"] == float(line.bubble_fraction)
    assert figures["seconds"] == float(line.makespan)
    assert figures["busy_seconds"] == [2 * 2 * 3 + 3] * 2
    assert figures["placement"] == [[0], [1], [0], [1]]
    assert figures["instructions"] == sum(map(len, REQUEST.program.ranks))


def test_the_headline_names_chunks_and_batches() -> None:
    assert headline(REQUEST) == "interleaved: 2 stages, 2 chunks per rank, 2 microbatches"
    batches = ScheduleRequest(REQUEST.program, "pipedream", 3, 4, 1, batches=3)
    assert headline(batches) == "pipedream: 3 stages, 3 batches of 4 microbatches"
    assert batches.bubble_of == "3 batches, with one fill and one drain"


def test_a_panel_has_the_spans_and_what_each_rank_keeps() -> None:
    drawn = panel(REQUEST, simulate(REQUEST.program))
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
