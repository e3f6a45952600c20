"""The protocol of a tracker, and how one runs: in a thread of its own, so that it delays and ends nothing.

on_start     once, also of a run that goes on
on_step      the numbers of a step, under the names that they have in metrics.jsonl; no step comes twice
on_evaluation, on_checkpoint
on_end       'finished', 'failed' or 'preempted'
"""

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

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
        """A step is done."""

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """A validation after a step is done."""

    def on_checkpoint(self, step: int) -> None:
        """The state after a step is saved."""

    def on_end(self, state: str) -> None:
        """Nothing follows: write what is not written."""


@final
class TrackerThread:
    """Runs the calls of one tracker. After one that raises there are no more; `failure` says why."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.failure: str | None = None
        self._tracker = tracker
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def start(self, run: TrackedRun, keep: Callable[[dict[str, str]], None]) -> None:
        """`keep` is called with what a later part of the run needs, in the tracker's thread."""
        self._add(lambda: keep(self._tracker.on_start(run)))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._add(lambda: self._tracker.on_step(step, values))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self._add(lambda: self._tracker.on_evaluation(step, values))

    def checkpoint(self, step: int) -> None:
        self._add(lambda: self._tracker.on_checkpoint(step))

    def end(self, state: str) -> None:
        """Wait until all is written, a minute at most."""
        self._add(lambda: self._tracker.on_end(state))
        self._add(None)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive() and self.failure is None:
            self.failure = f"it had not written everything {_END_SECONDS:.0f} seconds after the end"

    def _add(self, call: Callable[[], object] | None) -> None:
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
