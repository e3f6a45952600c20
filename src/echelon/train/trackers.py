"""Trackers: what one is, how it runs (in a thread of its own, so that it delays nothing), and all of a run.

Behind the logbook, events become calls, and no step comes twice. A run that goes on trains the steps after
its checkpoint again. Trackers have those already, so `trackers.json` in the run folder says up to where each
one came, and what it needs to go on with its record:

    {"wandb": {"steps": 120, "evaluations": 100, "state": {"id": "3f9a…"}}}

It is written when a part of the run begins, from what metrics.jsonl had then, and when it ends.
"""

import dataclasses
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, final

from echelon.state.bounded_json import parse_json
from echelon.train.events import Evaluated, Event, Saved, Stepped
from echelon.train.runs.run_folder import RunFolder

_MOST_WAITING = 100_000  # calls, of a tracker that is slower than the training
_END_SECONDS = 60.0


class TrackedRun(NamedTuple):
    """What a tracker is told first. `state` is what the tracker left of an earlier part of the run."""

    name: str
    folder: Path
    settings: Mapping[str, Any]  # the job, or what an own loop gave
    state: dict[str, str]


class Tracker:
    """The base of trackers: override what is needed. Called in one thread, in order, on rank 0 alone."""

    def on_start(self, run: TrackedRun) -> dict[str, str]:  # noqa: ARG002
        """Return what a later part of this run needs to go on with the same record: ids."""
        return {}

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """A step is done: its numbers, under the names of metrics.jsonl. No step comes twice."""

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """A validation after a step is done."""

    def on_checkpoint(self, step: int) -> None:
        """The state after a step is saved."""

    def on_end(self, state: str) -> None:
        """Nothing follows a 'finished', 'failed' or 'preempted': write what is not written."""


@final
class TrackerThread:
    """Runs the calls of one tracker. After one that raises there are no more; `failure` says why."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker = name, tracker
        self.failure: str | None = None
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def start(self, run: TrackedRun, keep: Callable[[dict[str, str]], None]) -> None:
        """`keep` is called with what a later part of the run needs, in the tracker's thread."""
        self.add(lambda: keep(self.tracker.on_start(run)))

    def end(self, state: str) -> None:
        """Wait until all is written, a minute at most."""
        self.add(lambda: self.tracker.on_end(state))
        self.add(None)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive() and self.failure is None:
            self.failure = f"it had not written everything {_END_SECONDS:.0f} seconds after the end"

    def add(self, call: Callable[[], object] | None) -> None:
        """Let the thread make a call, behind those before it; None ends it."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.failure = self.failure or f"it is slower than the training, by {_MOST_WAITING:,} calls"

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if self.failure is not None:
                continue
            try:
                call()
            except BaseException as error:  # SystemExit too: what a tracker does is its own affair
                self.failure = f"{type(error).__name__}: {error}"


STATE_FILE = "trackers.json"
_OWN_NAMES = ("step", "experts")  # fields of a step that are no number of it


@final
class Trackers:
    """Take events; `failures` are to be told to a person."""

    def __init__(
        self, trackers: Mapping[str, Tracker], folder: RunFolder, settings: Mapping[str, Any]
    ) -> None:
        self._folder, self._settings = folder, settings
        self._threads = [TrackerThread(name, tracker) for name, tracker in trackers.items()]
        self._seen = {name: _Seen.read(folder, name) for name in trackers}
        self._told: set[str] = set()
        self._lock = threading.Lock()  # of the state, which trackers' threads set
        self._has_started = False

    def start(self, known: Sequence[Stepped | Evaluated]) -> None:
        """Training begins, or goes on. `known`: the events that metrics.jsonl has, which a tracker that has
        seen the run before has too."""
        if self._has_started:
            return  # ranks were started again, and the trackers go on
        self._has_started = True
        for thread in self._threads:
            seen = self._seen[thread.name]
            run = TrackedRun(self._folder.path.name, self._folder.path, self._settings, seen.state)
            thread.start(run, partial(self._keep, thread.name))
            if not seen.is_new:
                for event in known:
                    seen.note(event)
            seen.is_new = False
        if self._threads:
            self._write()

    def take(self, event: Event) -> None:
        """Pass on what a tracker has not seen."""
        for thread in self._threads:
            tracker = thread.tracker
            if isinstance(event, Saved):
                thread.add(partial(tracker.on_checkpoint, event.step))
            elif isinstance(event, Stepped | Evaluated) and self._seen[thread.name].note(event):
                call = tracker.on_step if isinstance(event, Stepped) else tracker.on_evaluation
                thread.add(partial(call, event.step, values_of(event)))

    def end(self, state: str) -> None:
        for thread in self._threads:
            thread.end(state)
        if self._has_started and self._threads:
            self._write()

    def failures(self) -> list[str]:
        """What went wrong since the last call."""
        found = [
            thread for thread in self._threads if thread.failure is not None and thread.name not in self._told
        ]
        self._told.update(thread.name for thread in found)
        return [f"the tracker {thread.name} is off: {thread.failure}" for thread in found]

    def _keep(self, name: str, state: dict[str, str]) -> None:
        self._seen[name].state = state
        self._write()

    def _write(self) -> None:
        with self._lock:
            rows = {name: seen.to_dict() for name, seen in self._seen.items() if not seen.is_new}
            self._folder.write(STATE_FILE, json.dumps(rows, indent=2) + "\n")


@dataclasses.dataclass
class _Seen:
    is_new: bool = True
    steps: int = 0
    evaluations: int = 0
    state: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, folder: RunFolder, name: str) -> "_Seen":
        try:
            row = parse_json((folder.path / STATE_FILE).read_bytes())[name]
            state = {str(key): str(value) for key, value in row["state"].items()}
            return cls(False, int(row["steps"]), int(row["evaluations"]), state)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    def note(self, event: Stepped | Evaluated) -> bool:
        """Count an event; returns whether it is a new one."""
        kind = "steps" if isinstance(event, Stepped) else "evaluations"
        if event.step <= getattr(self, kind):
            return False
        setattr(self, kind, event.step)
        return True

    def to_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "evaluations": self.evaluations, "state": self.state}


def values_of(event: Stepped | Evaluated) -> dict[str, float]:
    """The numbers of an event: as in metrics.jsonl, those of a validation with `validation_` before them."""
    fields = dataclasses.asdict(event).items()
    values = {name: float(value) for name, value in fields if name not in _OWN_NAMES and value is not None}
    if isinstance(event, Evaluated):
        return {f"validation_{name}": value for name, value in values.items()}
    return values | {f"entropy/{gate.gate}": gate.entropy for gate in event.experts}
