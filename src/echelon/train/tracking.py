"""`echelon.track(engine, "wandb")`: the trackers and the run folder of a job, for a loop of your own."""

import os
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from echelon import __version__
from echelon.engine import Engine, Metrics
from echelon.errors import UserError, raise_errors
from echelon.parallel.observer import StepObserver
from echelon.train.events import MEASURED_STEP, Evaluated, Measured, Saved, Started, Stepped, measure_ranks
from echelon.train.loop import report_of
from echelon.train.run import Logbook
from echelon.train.runs.run_folder import FINISHED, RunFolder
from echelon.train.tracker_kinds import make_trackers, tracker_errors
from echelon.train.trackers import Tracker, Trackers

OUT, NAME = "runs", "loop"


def track(
    engine: Engine,
    *trackers: str | Tracker,
    folder: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> "Tracking":
    """Track the steps of an engine, from the next one on, and keep them in a run folder for `echelon report`.

        track(engine, "wandb", folder="runs/mine", project="gpt")

    `trackers`: jsonl, tensorboard, wandb, mlflow, trackio, or a Tracker of your own; `options` are those of
    the one that is named. `folder`: by default a new one in runs/; one that has steps goes on after the
    engine's.
    `settings` are kept with the run. All ranks must call this; rank 0 alone writes, and a tracker that fails
    ends nothing.
    """
    names = [each for each in trackers if isinstance(each, str)]
    errors = [f"tracker {error}" for error in tracker_errors(names)]
    if options and len(names) != 1:
        errors.append(f"{', '.join(options)}: are options of one tracker, and {len(names)} are named")
    raise_errors("echelon.track", errors)
    made = make_trackers(names, **options)
    own = {type(each).__name__: each for each in trackers if isinstance(each, Tracker)}
    tracking = Tracking(engine, None if folder is None else Path(folder), {**made, **own}, settings or {})
    engine.observe(tracking)
    return tracking


@final
class Tracking(StepObserver):
    """What tracks an engine. `evaluated` and `saved` tell it of what the engine's steps do not show."""

    def __init__(
        self, engine: Engine, path: Path | None, trackers: Mapping[str, Tracker], settings: Mapping[str, Any]
    ) -> None:
        self._engine = engine
        self._step = self._number = 0
        self._unread: list[tuple[Metrics, Any]] = []
        self._logbook: Logbook | None = None
        if engine.main:
            self._folder = _open(path, engine, settings)
            self._logbook = Logbook(self._folder, Trackers(trackers, self._folder, settings))

    def after_timing(self, number: int, metrics: Metrics) -> None:
        if self._logbook is not None and number <= max(self._step, self._logbook.last_step):
            self._start(number - 1)  # the engine has loaded an earlier step, or the folder has later ones
        elif self._number == 0:
            self._start(number - 1)
        self._step, self._number = number, self._number + 1
        if self._number == MEASURED_STEP:
            measured = measure_ranks(self._engine, number, self._number)
            self._take(measured)
        if self._logbook is not None:
            # Reading a step that is not done would leave a GPU idle.
            self._unread.append((metrics, report_of(self._engine, number, metrics)))
            while len(self._unread) > (0 if metrics.is_ready else 1):
                self._read()

    def evaluated(self, loss: float, accuracy: float | None = None) -> None:
        """Track a validation after the last step."""
        self._read_all()
        self._take(Evaluated(self._step, loss, accuracy))

    def saved(self) -> None:
        """Track that the state after the last step is saved."""
        self._take(Saved(self._step))

    def after_close(self, *, failed: bool) -> None:
        if self._logbook is None:
            return
        state = "failed" if failed else FINISHED
        if not failed:
            self._read_all()
        self._logbook.close(state)
        self._folder.mark(state, {"summary": self._logbook.summary()} if self._logbook.last_step else {})
        self._warn()

    def _start(self, after_step: int) -> None:
        self._read_all()
        device = self._engine.mesh.device
        parameters = sum(parameter.numel() for parameter in self._engine.module.parameters())
        self._take(Started(parameters, 0, "a loop", device.type, after_step=after_step))

    def _read_all(self) -> None:
        while self._unread:
            self._read()

    def _read(self) -> None:
        _, report = self._unread.pop(0)
        try:
            self._take(report())
        except UserError:  # a step that was refused, which the loop is told of too
            return

    def _take(self, event: Started | Stepped | Evaluated | Saved | Measured) -> None:
        if self._logbook is not None:
            self._logbook.take(event)
            self._warn()

    def _warn(self) -> None:
        for text in self._logbook.failures() if self._logbook is not None else ():
            warnings.warn(text, stacklevel=2)


def _open(path: Path | None, engine: Engine, settings: Mapping[str, Any]) -> RunFolder:
    versions = {"echelon": __version__, "torch": torch.__version__, "python": platform.python_version()}
    plan = str(engine.plan)
    about = {"plan": plan, "settings": dict(settings), "versions": versions, "pid": os.getpid()}
    if path is None:
        return RunFolder.create(Path(OUT), NAME, about)
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    folder.mark("running", about)
    return folder
