"""The loss of a run as a chart below a notebook's cell, drawn again while the run goes on.

    with echelon.live_chart("runs/mine"):
        echelon.launch(main, ranks=2)  # main: echelon.track(engine, folder="runs/mine")

Ranks are processes of their own, so the chart reads what they leave in the run folder.
"""

import threading
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, final

import numpy as np

from echelon.errors import UserError
from echelon.report.run_files import RunFiles, file_mark, read_run
from echelon.train.charts import Series, line_chart, side_by_side
from echelon.train.events import METRICS

_WIDTH, _HEIGHT = 440, 260
_SECONDS = 1.0  # between two looks at the folder
_SHARE = 0.02  # of the time that may go into reading and drawing, beside the training

Show = Callable[[str], None]


@final
class LiveChart:
    """`live_chart` returns one; it draws from `with` on, and once more at the end."""

    def __init__(self, folder: Path, show: Show) -> None:
        self._folder, self._show = folder, show
        self._shown: str | None = None
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="live chart", daemon=True)

    def __enter__(self) -> "LiveChart":
        self._draw()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._draw()
        if self._failure is not None:
            warnings.warn(f"the live chart of {self._folder} is off: {self._failure}", stacklevel=2)

    def _work(self) -> None:
        pause = _SECONDS
        while not self._over.wait(pause) and self._failure is None:
            start = time.thread_time()
            self._draw()
            pause = max(_SECONDS, (time.thread_time() - start) / _SHARE)

    def _draw(self) -> None:
        mark = file_mark(self._folder / METRICS)
        if mark == self._shown or self._failure is not None:
            return
        self._shown = mark
        try:
            self._show(picture(self._folder))
        except Exception as error:  # a chart that cannot be drawn ends no training
            self._failure = error


def live_chart(folder: str | Path) -> LiveChart:
    """Draw the run in `folder` below the cell, while what is inside of `with` runs. The folder may be new:
    the chart begins with the first step. Outside of a notebook, use `echelon watch`."""
    return LiveChart(Path(folder), _cell())


def picture(folder: Path) -> str:
    """Return the chart of what the folder has now, as SVG."""
    run = read_run(folder) if (folder / METRICS).exists() else RunFiles(folder)
    losses = [
        Series(name, rows["step"].tolist(), rows["loss"].tolist())
        for name, rows in (("training", run.steps), ("validation", run.evaluations))
        if rows
    ]
    speed = [Series("training", run.steps["step"].tolist(), _speed(run).tolist())] if run.steps else []
    return side_by_side(
        [
            line_chart(losses, f"Loss of {folder.name}", "step", "", _WIDTH, _HEIGHT),
            line_chart(speed, "Tokens per second", "step", "", _WIDTH, _HEIGHT),
        ],
        2,
    )


def _speed(run: RunFiles) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return run.steps["tokens"] / run.steps["seconds"]


def _cell() -> Show:
    """Return what shows SVG below the cell that runs, in the place of what it showed before."""
    try:
        shell = import_module("IPython").get_ipython()
        display: Any = import_module("IPython.display")
    except ImportError:
        shell = None
    if getattr(shell, "kernel", None) is None:
        raise UserError(
            "live_chart draws below a notebook's cell, and this is no notebook: use `echelon watch`"
        )
    handle: Any = None

    def show(text: str) -> None:
        nonlocal handle
        if handle is None:
            handle = display.display(display.SVG(text), display_id=True)
        else:
            handle.update(display.SVG(text))

    return show
