"""All trackers of a run: no step twice, whatever is started again."""

import json
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from echelon.train import trackers as module
from echelon.train.events import Event, Saved, Started
from echelon.train.run import Logbook
from echelon.train.runs.run_folder import RunFolder
from echelon.train.trackers import (
    STATE_FILE,
    TrackedRun,
    Tracker,
    Trackers,
    TrackerThread,
    values_of,
)
from tests.train.recording_tracker import Recording, evaluated, stepped


def part(folder: RunFolder, trackers: dict[str, Tracker], *events: Event, ends: bool = True) -> Logbook:
    """One process that trains a part of a run."""
    logbook = Logbook(folder, Trackers(trackers, folder, {}))
    for event in events:
        logbook.take(event)
    if ends:
        logbook.close()
    return logbook


def started(after: int = 0) -> Started:
    return Started(42, 9000, "stdlib", "cpu", after_step=after)


def test_ranks_that_are_started_again_repeat_no_step(tmp_path: Path) -> None:
    recording, folder = Recording(), RunFolder.create(tmp_path, "a", {})
    steps = [stepped(step) for step in (1, 2, 3, 4)]
    part(
        folder,
        {"one": recording},
        started(),
        *steps,
        Saved(2),
        started(2),
        stepped(3),
        stepped(4),
        stepped(5),
    )
    assert recording.steps() == [1, 2, 3, 4, 5]
    assert [call[0] for call in recording.calls] == ["start", *["step"] * 4, "checkpoint", "step", "end"]


def test_a_process_that_goes_on_repeats_no_step_and_keeps_the_record(tmp_path: Path) -> None:
    folder, first, second, late = RunFolder.create(tmp_path, "a", {}), Recording(), Recording(), Recording()
    events = [stepped(1), evaluated(1), stepped(2), stepped(3), evaluated(3), stepped(4)]
    lost = part(folder, {"one": first}, started(), *events, ends=False)  # killed: its end is never told
    lost._trackers.end("lost")  # so that its thread is done
    assert json.loads((folder.path / STATE_FILE).read_text())["one"]["state"] == {"id": "first"}
    more = [stepped(3), evaluated(3), stepped(4), stepped(5), evaluated(5)]
    part(folder, {"one": second, "late": late}, started(2), *more)
    assert second.calls == [
        ("start", folder.path.name, {"id": "first"}),
        ("step", 5, 1.0),
        ("evaluation", 5, 1.2),
        ("end", "finished"),
    ]
    assert late.calls[0] == ("start", folder.path.name, {})
    assert late.steps() == [1, 2, 3, 4, 5], "a tracker that is new gets what the others have"


def test_the_state_file_of_a_killed_process_may_be_behind_metrics(tmp_path: Path) -> None:
    """It is written at the start: the lines of metrics.jsonl say up to where trackers have come."""
    folder, second = RunFolder.create(tmp_path, "a", {}), Recording()
    lost = part(folder, {"one": Recording()}, started(), stepped(1), stepped(2), stepped(3), ends=False)
    rows = json.loads((folder.path / STATE_FILE).read_text())
    lost._trackers.end("lost")
    rows["one"] |= {"steps": 0, "state": {"id": "first"}}
    (folder.path / STATE_FILE).write_text(json.dumps(rows))
    part(folder, {"one": second}, started(1), stepped(2), stepped(3), stepped(4))
    assert second.steps() == [4]


def test_a_failure_is_told_once_and_others_go_on(tmp_path: Path) -> None:
    folder, good = RunFolder.create(tmp_path, "a", {}), Recording()
    logbook = part(folder, {"bad": Recording(fails_at=1), "good": good}, started(), stepped(1), stepped(2))
    assert logbook.failures() == ["the tracker bad is off: SystemExit: no network"]
    assert logbook.failures() == []
    assert good.steps() == [1, 2]


def test_a_damaged_state_file_is_as_none(tmp_path: Path) -> None:
    folder, recording = RunFolder.create(tmp_path, "a", {}), Recording()
    for text in ("{", "[]", '{"one": 3}', '{"one": {"steps": "x", "evaluations": 0, "state": {}}}'):
        (folder.path / STATE_FILE).write_text(text)
        recording.calls.clear()
        part(folder, {"one": recording}, started())
        assert recording.calls[0] == ("start", folder.path.name, {})


def test_values_have_the_names_of_metrics_and_validations_a_prefix() -> None:
    assert values_of(evaluated(2)) == {"validation_loss": 3.0}
    values = values_of(stepped(5))
    assert (values["loss"], values["skipped"], values["entropy/blocks.0.gate"]) == (1.0, 0.0, 0.5)
    assert "step" not in values
    assert "experts" not in values


RUN = TrackedRun("a", Path("a"), {}, {})


def test_calls_come_in_order_in_one_thread() -> None:
    recording, kept = Recording(), list[dict[str, str]]()
    thread = TrackerThread("one", recording)
    thread.start(RUN, kept.append)
    thread.add(partial(thread.tracker.on_step, 1, {"loss": 3.0}))
    thread.add(partial(thread.tracker.on_evaluation, 1, {"validation_loss": 2.0}))
    thread.add(partial(thread.tracker.on_checkpoint, 1))
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
        thread.add(partial(thread.tracker.on_step, step, {"loss": 1.0}))
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
    thread.add(partial(thread.tracker.on_step, 1, {}))
    while thread._calls.qsize():
        time.sleep(0.001)
    for step in range(2, 8):
        thread.add(partial(thread.tracker.on_step, step, {}))
    thread.end("finished")
    assert thread.failure == "it had not written everything 0 seconds after the end"
    for step in range(20):
        thread.add(partial(thread.tracker.on_step, step, {}))
    assert thread.failure is not None
    stuck.released.set()
    thread._thread.join(30)


def test_a_tracker_needs_to_override_nothing() -> None:
    thread = TrackerThread("none", Tracker())
    thread.start(RUN, lambda _: None)
    thread.add(partial(thread.tracker.on_step, 1, {}))
    thread.add(partial(thread.tracker.on_evaluation, 1, {}))
    thread.add(partial(thread.tracker.on_checkpoint, 1))
    thread.end("failed")
    assert thread.failure is None
