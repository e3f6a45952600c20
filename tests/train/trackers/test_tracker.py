"""One tracker in its thread: in order, and without any harm to the training."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from echelon.train.trackers import tracker as module
from echelon.train.trackers.tracker import TrackedRun, Tracker, TrackerThread
from tests.train.trackers.recording import Recording

RUN = TrackedRun("a", Path("a"), {}, {})


def test_calls_come_in_order_in_one_thread() -> None:
    recording, kept = Recording(), list[dict[str, str]]()
    thread = TrackerThread("one", recording)
    thread.start(RUN, kept.append)
    thread.step(1, {"loss": 3.0})
    thread.evaluation(1, {"validation_loss": 2.0})
    thread.checkpoint(1)
    thread.end("finished")
    assert recording.calls == [
        ("start", "a", {}),
        ("step", 1, 3.0),
        ("evaluation", 1, 2.0),
        ("checkpoint", 1),
        ("end", "finished"),
    ]
    assert kept == [{"id": "first"}]
    assert thread.failure is None


def test_after_a_failure_there_are_no_more_calls() -> None:
    recording = Recording(fails_at=2)
    thread = TrackerThread("one", recording)
    thread.start(RUN, lambda _: None)
    for step in (1, 2, 3):
        thread.step(step, {"loss": 1.0})
    thread.end("finished")
    assert thread.failure == "SystemExit: no network"
    assert recording.steps() == [1]


class Stuck(Tracker):
    def __init__(self) -> None:
        self.released = threading.Event()

    def on_step(self, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002
        self.released.wait()


def test_one_that_hangs_holds_up_no_step_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_END_SECONDS", 0.05)
    monkeypatch.setattr(module, "_MOST_WAITING", 10)
    stuck = Stuck()
    thread = TrackerThread("one", stuck)
    thread.step(1, {})
    while thread._calls.qsize():
        time.sleep(0.001)
    for step in range(2, 8):
        thread.step(step, {})
    thread.end("finished")
    assert thread.failure == "it had not written everything 0 seconds after the end"
    for step in range(20):
        thread.step(step, {})
    assert thread.failure is not None
    stuck.released.set()
    thread._thread.join(30)


def test_a_tracker_needs_to_override_nothing() -> None:
    thread = TrackerThread("none", Tracker())
    thread.start(RUN, lambda _: None)
    thread.step(1, {})
    thread.evaluation(1, {})
    thread.checkpoint(1)
    thread.end("failed")
    assert thread.failure is None
