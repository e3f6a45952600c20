"""The page in a browser: it draws, says no error, answers the mouse, and is fast for long and wide runs."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.report.page import MOST_BYTES, gather, render
from tests.report.browser import Browser, Page, needs_chromium
from tests.report.folders import step_row, write_run
from tests.report.profiler_traces import write_trace
from tests.report.test_page import hostile_run, served

pytestmark = needs_chromium

PREDICTED = {
    "plan": "data=2 zero=1",
    "seconds": 0.4,
    "peak": 1000.0,
    "mfu": 0.4,
    "command": "echelon train --plan x",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


def written(path: Path, *runs: Path) -> str:
    data = gather(list(runs), predict=False)
    for run in data["runs"]:
        run["plans"] = [{**PREDICTED, "gain": 0.25}]
    page = path / "page.html"
    page.write_text(render(data), encoding="utf-8")
    return page.as_uri()


def is_wider_than_the_screen(page: Page) -> bool:
    return bool(page.ask("document.documentElement.scrollWidth > innerWidth"))


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_a_run_is_drawn_without_an_error(width: int, dark: bool, tmp_path: Path, browser: Browser) -> None:
    run = write_run(tmp_path)
    (run / "profiler").mkdir()
    write_trace(run / "profiler" / "0.json", 0, random.Random(0))
    page = browser.open(written(tmp_path, run), width=width, dark=dark)
    titles = ["Curves", "Timeline", "Where the time goes", "What the GPU streams did", "A step, by part"]
    titles += [
        "Memory",
        "Bytes that rank 0 sends in a step",
        "The model over stages",
        "How to do better",
        "What happened",
    ]
    assert page.texts("h2") == [*titles, "Machine and job"]
    assert page.ask("document.querySelectorAll('.uplot canvas').length") >= 6
    assert not is_wider_than_the_screen(page)
    back = page.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, back[4:-1].split(","))) < 200) == dark
    drawn = (
        "(() => { const c = document.querySelector('[data-timeline] canvas'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const s = new Set(); "
        "for (let i = 0; i < d.length; i += 4) s.add(d[i] + ',' + d[i + 1] + ',' + d[i + 2]); "
        "return [s.has('59,130,246'), s.has('245,158,11')]; })()"
    )
    assert page.ask(drawn) == [True, True], "a forward and a backward pass, in their colours"
    assert page.errors() == []


def test_the_mouse_reads_curves_and_zooms(tmp_path: Path, browser: Browser) -> None:
    page = browser.open(written(tmp_path, write_run(tmp_path)))
    plot = "[data-chart=Loss] .u-over"
    page.mouse("mouseMoved", *page.point(plot, 0.5))
    legend = "[...document.querySelectorAll('[data-chart=Loss] .u-value')].map((e) => e.textContent)"
    step, *values = page.ask(legend)
    assert 9 <= float(step) <= 12
    assert any(value not in ("", "–", "--") for value in values)
    ticks = "document.querySelector('[data-chart=Loss] .u-value').textContent"
    start, stop = page.point(plot, 0.5), page.point(plot, 0.75)
    page.mouse("mousePressed", *start, button="left", clickCount=1)
    page.mouse("mouseMoved", *stop, button="left", buttons=1)
    page.mouse("mouseReleased", *stop, button="left", clickCount=1)
    page.mouse("mouseMoved", *page.point(plot, 0.02))
    assert float(page.ask(ticks)) >= 10, "the left end of the curve is where the zoom began"
    assert page.errors() == []


def test_the_timeline_names_what_is_under_the_mouse_and_zooms(tmp_path: Path, browser: Browser) -> None:
    page = browser.open(written(tmp_path, write_run(tmp_path)))
    shown = "[document.querySelector('.tip').style.display, document.querySelector('.tip').textContent]"
    x, y = page.point("[data-timeline] canvas", 0.14, 0)
    page.mouse("mouseMoved", x, y + 30)
    display, text = page.ask(shown)
    assert display == "block"
    assert text.startswith("F0forward, rank 01 s")
    for _ in range(12):
        page.mouse("mouseWheel", x, y + 30, deltaX=0, deltaY=-100)
    page.mouse("mouseMoved", x + 300, y + 30)
    assert page.ask(shown)[1].startswith("F0"), "the forward pass fills the timeline now"
    page.ask("[...document.querySelectorAll('button')].find((b) => b.textContent === 'whole step').click()")
    page.mouse("mouseMoved", x + 300, y + 30)
    assert page.ask(shown)[1].startswith("B0")
    page.ask("(() => { const s = document.querySelector('select'); s.value = 2; s.onchange; "
             "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    assert page.errors() == []


def test_smoothing_and_the_log_scale_draw_again(tmp_path: Path, browser: Browser) -> None:
    page = browser.open(written(tmp_path, write_run(tmp_path)))
    names = "[...document.querySelectorAll('[data-chart=Loss] .u-label')].map((e) => e.textContent)"
    assert page.ask(names) == ["step", "raw", "training", "validation"]
    page.ask("(() => { const s = document.querySelector('#smoothing'); s.value = 0; "
             "s.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert page.ask(names) == ["step", "training", "validation"]
    before = page.ask("document.querySelector('[data-chart=Loss] canvas').toDataURL()")
    page.ask("document.querySelector('#log').click()")
    assert page.ask("document.querySelector('[data-chart=Loss] canvas').toDataURL()") != before
    assert page.errors() == []


@pytest.mark.parametrize("width", [1280, 390])
def test_runs_are_compared_on_one_page(width: int, tmp_path: Path, browser: Browser) -> None:
    runs = [write_run(tmp_path, name=f"run-{n}", steps=20 + 10 * n, plan=f"data={n}") for n in (1, 2, 3)]
    page = browser.open(written(tmp_path, *runs), width=width)
    assert page.texts("h2")[:2] == ["Curves", "Differences"]
    names = page.ask("[...document.querySelectorAll('[data-chart=Loss] .u-label')].map((e) => e.textContent)")
    assert [name for name in names if name.endswith("validation")] == [
        f"run-{n}, validation" for n in (1, 2, 3)
    ]
    assert page.texts("details > summary")[:1] == ["run-1"]
    page.ask("document.querySelectorAll('main > details')[1].open = true")
    page.ask("new Promise((done) => setTimeout(done, 50))")
    assert not is_wider_than_the_screen(page)
    assert page.errors() == []


def test_hostile_names_do_nothing(tmp_path: Path, browser: Browser) -> None:
    page = browser.open(written(tmp_path, hostile_run(tmp_path)))
    assert (
        page.ask("document.querySelectorAll('img').length + document.querySelectorAll('main script').length")
        == 0
    )
    assert page.texts("h1") == ["<img src=x onerror=alert(1)>"]
    assert "alert(1)" in page.texts(".sub")[0]
    assert page.errors() == []


def test_strange_folders_have_pages(tmp_path: Path, browser: Browser) -> None:
    for name, files in {
        "only-json": {"run.json": "{}"},
        "only-metrics": {"metrics.jsonl": json.dumps(step_row(1)) + "\n{"},
        "empty": {"metrics.jsonl": ""},
        "broken": {
            "run.json": "{",
            "metrics.jsonl": "\x00",
            "trace.json": "[]",
            "measured.json": '{"ranks": [3]}',
        },
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(text)
        page = browser.open(written(tmp_path, folder))
        assert page.texts("h1") == [name]
        assert page.errors() == [], name


def test_the_page_of_a_long_and_wide_run_is_small(tmp_path: Path, browser: Browser) -> None:
    """100,000 steps and 64 ranks: what is drawn does not grow with the run, and no spike is lost."""
    address = written(tmp_path, write_run(tmp_path, steps=100_000, ranks=64))
    assert (tmp_path / "page.html").stat().st_size < MOST_BYTES
    page = browser.open(address)
    assert page.ask("document.querySelectorAll('.uplot canvas').length") >= 6
    assert (
        page.ask("JSON.parse(document.getElementById('data').textContent).runs[0].series.loss.x.length")
        <= 2002
    )
    spike = "Math.max(...JSON.parse(document.getElementById('data').textContent).runs[0].series.loss.y)"
    assert page.ask(spike) > 7, "the spike of one step is there"
    assert page.errors() == []


def test_the_live_page_follows_the_run(tmp_path: Path, browser: Browser) -> None:
    folder = write_run(tmp_path, steps=4, state="running")
    with served(folder) as server:
        page = browser.open(server.url)
        tile = "[...document.querySelectorAll('.tile')].map((e) => e.textContent)"
        tile += ".find((text) => text.startsWith('steps'))"
        assert page.ask(tile) == "steps4of 4"
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step_row(5)) + "\n")
        page.wait(f"{tile} === 'steps5of 4'")
        assert page.errors() == []
    page.wait("document.getElementById('live').textContent === 'the server is gone'")
