"""A chart below a notebook's cell follows the run folder, and nothing that it does ends a training."""

import json
import time
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

import echelon
from echelon.errors import UserError
from echelon.report import live_chart as module
from echelon.report.live_chart import LiveChart, picture
from tests.launching.kernels import kernel
from tests.report.folders import step_row, write_run

CELL = """
import torch
import echelon

torch.manual_seed(0)
with echelon.live_chart("runs/mine"):
    engine = echelon.parallelize(
        torch.nn.Linear(2, 1), "data=1",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss=torch.nn.functional.mse_loss,
    )
    with engine:
        echelon.track(engine, folder="runs/mine")
        for _ in range(3):
            engine.step((torch.ones(4, 2), torch.zeros(4, 1)))
"""


def add_step(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step_row(step)) + "\n")


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_draws_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.01)
    monkeypatch.setattr(module, "_SHARE", 100.0)
    folder, drawn = tmp_path / "mine", list[str]()
    with LiveChart(folder, drawn.append):
        assert "no data" in drawn[0]
        folder.mkdir()
        add_step(folder, 1)
        until(lambda: len(drawn) == 2)
        add_step(folder, 2)
        until(lambda: len(drawn) == 3)
        time.sleep(0.1)
        assert len(drawn) == 3, "what has not changed is not drawn again"
    assert len(drawn) == 3
    assert "no data" not in drawn[-1]


def test_steps_of_the_last_moment_are_drawn_at_the_end(tmp_path: Path) -> None:
    folder, drawn = write_run(tmp_path), list[str]()
    with LiveChart(folder, drawn.append):
        add_step(folder, 21)
    assert drawn == [drawn[0], picture(folder)]
    assert drawn[0] != drawn[1]


def test_it_shows_losses_and_speed(tmp_path: Path) -> None:
    text = picture(write_run(tmp_path, name="a <b>&"))
    xml.etree.ElementTree.fromstring(text)
    for words in ("Loss of a &lt;b&gt;&amp;", "training", "validation", "Tokens per second"):
        assert words in text


def test_a_chart_that_cannot_be_drawn_ends_nothing(tmp_path: Path) -> None:
    folder, calls = write_run(tmp_path), list[str]()

    def show(text: str) -> None:
        calls.append(text)
        raise OSError("the page is closed")

    with pytest.warns(UserWarning, match="is off: the page is closed"), LiveChart(folder, show):
        add_step(folder, 21)
    assert len(calls) == 1


def test_outside_of_a_notebook_it_names_the_live_page() -> None:
    with pytest.raises(UserError, match="use `echelon watch`"):
        echelon.live_chart("runs/mine")


def test_a_cell_shows_one_chart(tmp_path: Path) -> None:
    shown, updated = list[str](), list[str]()
    with kernel() as notebook:
        notebook.run(f"import os; os.chdir({str(tmp_path)!r})")
        cell = notebook.run(CELL, on_picture=lambda again, text: (updated if again else shown).append(text))
    assert not cell.error, cell.message
    assert len(shown) == 1
    assert "no data" in shown[0]
    assert "Loss of mine" in updated[-1]
    assert "no data" not in updated[-1]
