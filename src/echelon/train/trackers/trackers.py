"""All trackers of one run, behind the logbook: events become calls, and no step comes twice.

A run that goes on trains the steps after its checkpoint again. Trackers have those already, so
`trackers.json` in the run folder says up to where each one came, and what it needs to go on with its record:

    {"wandb": {"steps": 120, "evaluations": 100, "state": {"id": "3f9a…"}}}

It is written when a part of the run begins, from what metrics.jsonl had then, and when it ends.
"""

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

from echelon.state.bounded_json import parse_json
from echelon.train.events import Evaluated, Event, Saved, Stepped
from echelon.train.runs.run_folder import RunFolder
from echelon.train.trackers.tracker import TrackedRun, Tracker, TrackerThread

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

    def catch_up(self, known: Sequence[Stepped | Evaluated]) -> None:
        """Pass on what a tracker has not seen of the steps before those to come."""
        for thread in self._threads:
            for event in known:
                self._pass_on(thread, event)

    def take(self, event: Event) -> None:
        for thread in self._threads:
            if isinstance(event, Stepped | Evaluated):
                self._pass_on(thread, event)
            elif isinstance(event, Saved):
                thread.checkpoint(event.step)

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

    def _pass_on(self, thread: TrackerThread, event: Stepped | Evaluated) -> None:
        if not self._seen[thread.name].note(event):
            return
        if isinstance(event, Stepped):
            thread.step(event.step, values_of(event))
        else:
            thread.evaluation(event.step, values_of(event))

    def _keep(self, name: str, state: dict[str, str]) -> None:
        self._seen[name].state = state
        self._write()

    def _write(self) -> None:
        with self._lock:
            rows = {name: seen.to_dict() for name, seen in self._seen.items() if not seen.is_new}
            self._folder.write(STATE_FILE, json.dumps(rows, indent=2) + "\n")


@dataclasses.dataclass
class _Seen:
    """Up to where a tracker has come."""

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
