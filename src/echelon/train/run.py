"""A run while it is trained: its folder, its logbook, and a function that shows events.

The logbook keeps the events of a training in its run folder, and passes them on to its trackers.
"""

import dataclasses
import fcntl
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from echelon import __version__
from echelon.engine.audit import AuditResult
from echelon.errors import UserError
from echelon.launching import host_work
from echelon.train import events, strict_json
from echelon.train.charts import Series, line_chart, side_by_side
from echelon.train.jobs.job import Job, as_plain
from echelon.train.runs import Preempted
from echelon.train.runs.run_folder import FINISHED, PREEMPTED, RunFolder, explain_os_errors
from echelon.train.tracker_kinds import make_trackers
from echelon.train.trackers import Trackers

SAVED = "saved.jsonl"


class Logbook:
    """Takes every event, in order; `close` draws the loss, `summary` has the results.

    Of a run that goes on, it begins with what the folder has.
    """

    def __init__(self, folder: RunFolder, trackers: Trackers | None = None) -> None:
        """`trackers`: by default TensorBoard, if it is installed."""
        self._folder = folder
        self._trackers = Trackers(make_trackers(None), folder, {}) if trackers is None else trackers
        self._steps: list[events.Stepped]
        self._evaluations: list[events.Evaluated]
        self._started: events.Started | None = None
        self._audit: tuple[AuditResult, ...] = ()
        self._metrics = folder.path / events.METRICS
        self._read()

    def take(self, event: events.Event) -> None:
        match event:
            case events.Started():
                self._started = event
                self._trackers.start(self._events)
                self._cut(event.after_step)
                self._fill(events.metrics_with(self._metrics, event.lines))
                self._fill(events.metrics_with_rollbacks(self._metrics, event.rollbacks))
                for known in self._events:  # which a tracker may not have seen
                    self._trackers.take(known)
            case events.Audited():
                self._audit = event.results
            case events.Stepped():
                self._steps.append(event)
                self._line(event)
            case events.Evaluated():
                self._evaluations.append(event)
                self._line(event)
            case events.Saved(step):
                self._folder.append(SAVED, [{"step": step, "time": time.time()}])
            case events.Measured():
                self._folder.write(events.MEASURED, strict_json.dump(dataclasses.asdict(event)) + "\n")
            case events.RolledBack():
                self._cut(event.step)
                self._num_rollbacks = event.number
                self._line(event)
            case events.Sampled():
                self._folder.write("sample.txt", event.text + "\n")
        self._trackers.take(event)

    @property
    def has_started(self) -> bool:
        """True if ranks began to train: before that there is nothing to keep."""
        return self._started is not None

    @property
    def _events(self) -> list[events.Stepped | events.Evaluated]:
        """Steps and validations, each validation after its step."""
        return sorted(
            [*self._steps, *self._evaluations],
            key=lambda event: (event.step, isinstance(event, events.Evaluated)),
        )

    @property
    def last_step(self) -> int:
        return self._steps[-1].step if self._steps else 0

    def failures(self) -> list[str]:
        """What went wrong with trackers since the last call."""
        return self._trackers.failures()

    def close(self, state: str = FINISHED) -> None:
        """Draw the loss of the steps that there are, and let trackers write what they have."""
        self._trackers.end(state)
        if self._steps:
            marks: dict[str, Sequence[events.Stepped | events.Evaluated]] = {
                "training": self._steps,
                "validation": self._evaluations,
            }
            series = [Series(n, [e.step for e in of], [e.loss for e in of]) for n, of in marks.items() if of]
            unit = f"nats per {self._unit.removesuffix('s')}"
            self._folder.write("loss.svg", line_chart(series, "Loss", "step", unit))
            if self._steps[-1].experts:
                self._folder.write("experts.svg", expert_picture(self._steps))

    def summary(self) -> dict[str, Any]:
        steps = self._steps
        usual = statistics.median(step.seconds for step in steps)
        return {
            "steps": len(steps),
            "parameters": self._started.parameters if self._started else 0,
            "first_loss": steps[0].loss,
            "loss": steps[-1].loss,
            "validation_loss": self._evaluations[-1].loss if self._evaluations else None,
            "validation_accuracy": self._evaluations[-1].accuracy if self._evaluations else None,
            "unit": self._unit,
            "tokens": sum(step.tokens for step in steps),
            "step_seconds": usual,
            "tokens_per_second": steps[-1].tokens / usual,
            "memory_bytes": max(step.memory_bytes for step in steps),
            "skipped_steps": sum(step.skipped for step in steps),
            "rollbacks": self._num_rollbacks,
            "largest_expert_share": max((gate.largest_share for gate in steps[-1].experts), default=None),
            "audit": [
                {"name": each.name, "outcome": each.outcome, "reason": each.reason} for each in self._audit
            ],
        }

    def _cut(self, step: int) -> None:
        """Forget what came after `step`: it is trained again."""
        self._steps = [event for event in self._steps if event.step <= step]
        self._evaluations = [event for event in self._evaluations if event.step <= step]
        if self._metrics.exists():
            self._folder.write(events.METRICS, events.metrics_until(self._metrics, step))

    def _fill(self, text: str | None) -> None:
        """Write the file with lines that a process was killed before it wrote, if there are any."""
        if text is not None:
            self._folder.write(events.METRICS, text)
            self._read()

    def _read(self) -> None:
        read = events.read_metrics(self._metrics)
        self._steps = [event for event in read if isinstance(event, events.Stepped)]
        self._evaluations = [event for event in read if isinstance(event, events.Evaluated)]
        self._num_rollbacks = events.count_rollbacks(self._metrics)

    def _line(self, event: events.Stepped | events.Evaluated | events.RolledBack) -> None:
        self._folder.append(events.METRICS, [events.entry_of(event)])

    @property
    def _unit(self) -> str:
        return self._started.unit if self._started else "tokens"


# The picture of what gates did in a training: the share of each expert in the tokens, and the entropy.

_MOST_LINES = 8  # experts that have a line each; of more, the largest, the median and the smallest
_MOST_PANELS = 12  # gates that have a panel each; of more, some that are spread over the layers
_MOST_POINTS = 200
_WIDTH, _HEIGHT = 480, 280

T = TypeVar("T")


def expert_picture(steps: Sequence[events.Stepped]) -> str:
    """One panel for each gate, and one for the entropy of all."""
    steps = [step for step in _spread(steps, _MOST_POINTS) if step.experts]
    gates = _spread(range(len(steps[0].experts)), _MOST_PANELS)
    x = [step.step for step in steps]
    panels = []
    for gate in gates:
        loads = [step.experts[gate] for step in steps]
        series = [Series(name, x, y) for name, y in _shares(loads).items()]
        panels.append(line_chart(series, loads[0].gate, "step", "share of tokens", _WIDTH, _HEIGHT))
    names = {gate: steps[0].experts[gate].gate for gate in gates}
    entropies = [Series(names[gate], x, [step.experts[gate].entropy for step in steps]) for gate in gates]
    panels.append(line_chart(entropies, "Entropy of gates", "step", "nats", _WIDTH, _HEIGHT))
    return side_by_side(panels, 2)


def _shares(loads: Sequence[events.GateLoad]) -> dict[str, list[float]]:
    """Lines by name: the part of the slots that each expert had in each step."""
    shares = [[tokens / (sum(load.tokens) or 1.0) for tokens in load.tokens] for load in loads]
    if len(shares[0]) <= _MOST_LINES:
        return {f"{index}": list(line) for index, line in enumerate(zip(*shares, strict=True))}
    in_order = [sorted(step) for step in shares]
    middle = len(in_order[0]) // 2
    places = {"largest": -1, "median": middle, "smallest": 0}
    return {name: [step[place] for step in in_order] for name, place in places.items()}


def _spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many of the items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


Show = Callable[[events.Event], None]


@dataclass(frozen=True)
class Run:
    """Keeps and shows what happens; `finish` it, or the error that leaves `open_run` ends it."""

    folder: RunFolder
    logbook: Logbook
    show: Show
    is_new: bool

    def take(self, event: events.Event) -> None:
        self.logbook.take(event)
        match event:
            case events.Restarting(reason, number):
                self.folder.note("restart", reason=reason, number=number, after_step=self.logbook.last_step)
            case events.RolledBack(step, from_step, reason):
                self.folder.note("rollback", step=step, from_step=from_step, reason=reason)
            case events.Limited(steps, of, minutes, warmup):
                self.folder.limit_steps(steps, warmup)
                self.folder.note("note", text=f"{minutes:g} minutes: {steps} of {of} steps")
            case events.Noted(text):
                self.folder.note("note", text=text)
        self.show(event)
        self._tell_failures()

    def _tell_failures(self) -> None:
        """A tracker that fails ends no run."""
        for text in self.logbook.failures():
            self.folder.note("note", text=text)
            self.show(events.Noted(text))

    def finish(self) -> dict[str, Any]:
        with host_work("the picture of the loss"):  # rank 0 of torchrun, for which others may wait
            self.logbook.close()
        self._tell_failures()
        summary = {"run": str(self.folder.path), **self.logbook.summary()}
        self.folder.mark(FINISHED, {"summary": summary})
        return summary

    def break_off(self, error: BaseException) -> None:
        """Keep what there is of a run that `error` ends; nothing, if the user's mistake let none begin."""
        if isinstance(error, UserError) and self.is_new and not self.logbook.has_started:
            self.folder.discard()
            return
        with suppress(UserError):  # a full disk must not hide the error
            self.logbook.close(PREEMPTED if isinstance(error, Preempted) else "failed")
            self._tell_failures()
        if isinstance(error, Preempted):
            with suppress(UserError):
                self.folder.mark(PREEMPTED, {"reason": str(error)})
            saved = f"step {error.step} was the last, and is saved" if error.step else "no step was made"
            error.add_note(f"{saved}; go on with: echelon train --resume {self.folder.path}")
            return
        self.folder.fail(f"{type(error).__name__}: {error}")
        last = self.logbook.last_step
        done = f"step {last} was the last" if last else "no step was made"
        error.add_note(f"{done}; the run is in {self.folder.path}")


@contextmanager
def open_run(job: Job, show: Show, path: Path | None = None, launch: Sequence[str] = ()) -> Iterator[Run]:
    """A new run, or that in `path`. If anything is raised inside, it is marked as failed or preempted, or
    removed if it never began. `launch` names the processes that started the ranks, if that is torchrun.
    """
    versions = {"echelon": __version__, "torch": torch.__version__, "python": platform.python_version()}
    about = {"job": as_plain(job), "plan": job.plan, "versions": versions, "pid": os.getpid()}
    if launch:
        about["launch"] = list(launch)
    folder = RunFolder.create(Path(job.out), job.name, about) if path is None else RunFolder(path)
    with locked(folder.path):
        if path is not None:
            folder.mark("running", about)
            folder.note("resume", after_step=events.last_step(path / events.METRICS))
        try:
            trackers = Trackers(make_trackers(job.track), folder, as_plain(job))
            run = Run(folder, Logbook(folder, trackers), show, is_new=path is None)
        except BaseException:
            if path is None:
                folder.discard()
            raise
        try:
            run.take(events.Starting(str(folder.path)))
            yield run
        except BaseException as error:
            run.break_off(error)
            raise


# One process at a time trains in a run folder: a lock that the system releases when the process ends.

_LOCK = ".lock"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the lock of a run folder; a UserError if another process holds it."""
    path = run / _LOCK
    with explain_os_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"the run in {run} is still being trained, by another process; wait for its end, or end it"
            ) from None
        yield
    finally:
        os.close(descriptor)
