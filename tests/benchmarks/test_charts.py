"""The bench of charts, with small ones: what is drawn is the same, and what is not there is said."""

import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import charts, drawing


@pytest.mark.parametrize("case", [drawing.LOSS, drawing.SCHEDULE])
def test_a_fresh_process_draws_and_says_what_it_took(case: str, tmp_path: Path) -> None:
    (row,) = charts._pictures("a case", case, 8, ["echelon, SVG"], 1, tmp_path)
    assert (row.case, row.contender, row.baseline) == ("a case", "echelon, SVG", "echelon, SVG")
    assert ElementTree.parse(tmp_path / f"{case}-echelon.svg").getroot().tag.endswith("svg")
    assert row.extras["file_bytes"] == (tmp_path / f"{case}-echelon.svg").stat().st_size
    assert 0 < row.seconds.median < 60
    assert 5e6 < row.extras["peak_bytes"] < 1e9


def test_nothing_that_draws_is_imported_before_the_clock_starts() -> None:
    program = "import sys; import runpy; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    command = [sys.executable, "-P", "-c", program, drawing.__file__]
    modules = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert "echelon.program" in modules
    assert not {"torch", "numpy", "matplotlib", "echelon.train.charts", "echelon.program.picture"} & {
        *modules
    }


@pytest.mark.slow
def test_both_draw_the_same_boxes_and_words(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    from echelon.program.text import labels

    timeline = drawing.spans(8)
    assert len(timeline) == 2 * 8 * drawing.STAGES
    for draw in (drawing.schedule_by_echelon, drawing.schedule_by_matplotlib):
        draw(timeline, tmp_path / "a.svg")
        words = {each.text for each in ElementTree.parse(tmp_path / "a.svg").iterfind(".//{*}text")}
        missing = [label for label in labels(timeline) if not {label, label[1:]} & words]
        assert missing == []  # ours leaves the letter out where it does not fit: the colour says the same
    drawing.loss_by_matplotlib(drawing.losses(100), tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_libraries_that_cannot_be_fetched_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no npm there
    codes, missing = charts._page_codes(tmp_path)
    assert list(codes) == [charts.UPLOT]
    assert missing == [package for packages in charts.PAGE_PEERS.values() for package in packages]


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed: apt-get install nodejs")
def test_code_is_compiled_and_counted(tmp_path: Path) -> None:
    small, large = tmp_path / "small.js", tmp_path / "large.js"
    small.write_text("throw 1")  # compiled, and not run
    large.write_text("".join(f"function f{n}() {{ return {n} }}\n" for n in range(100_000)))
    one, both = charts._compiled({"small": [small], "both": [small, large]}, 1)
    assert (one.extras["file_bytes"], both.extras["file_bytes"]) == (7, 7 + large.stat().st_size)
    assert both.ratio.median > 1
