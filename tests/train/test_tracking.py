"""A loop of the user's own leaves a run folder, and tells trackers what a job would."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.report.contents import contents
from echelon.report.run_files import read_run
from tests.cases import vectors
from tests.engine.step.runtime.watched_engine import engine_for
from tests.train.recording_tracker import Recording

Warm = Callable[[int], Ranks]


def loop(folder: Path) -> tuple[list[float], list[tuple[object, ...]]]:
    recording = Recording()
    with engine_for("data=2") as engine:
        tracking = echelon.track(engine, "jsonl", recording, folder=folder, settings={"note": "mine"})
        losses = []
        for step in range(7):
            losses.append(engine.step(engine.local(vectors(step))).loss)
            if step == 3:
                tracking.evaluated(1.5)
                tracking.saved()
    return losses, recording.calls


def test_rank_0_alone_tracks_and_the_folder_is_that_of_a_run(tmp_path: Path, warm_ranks: Warm) -> None:
    (losses, calls), (_, others) = warm_ranks(2).run(loop, tmp_path / "mine")
    assert others == []
    steps = [("step", step, loss) for step, loss in enumerate(losses, 1)]
    assert calls == [
        ("start", "mine", {}),
        *steps[:4],
        ("evaluation", 4, 1.5),
        ("checkpoint", 4),
        *steps[4:],
        ("end", "finished"),
    ]
    run = contents(read_run(tmp_path / "mine"), {})
    assert (run["state"], run["plan"], run["notes"]) == ("finished", "data=2", [])
    assert run["series"]["loss"]["y"] == pytest.approx(losses)
    assert run["figures"]["validation_loss"] == 1.5
    assert [mark["step"] for mark in run["marks"]] == [4]
    assert len(run["memory"]["ranks"]) == 2


def test_a_loop_that_goes_on_from_a_checkpoint_repeats_no_step(tmp_path: Path) -> None:
    first, second = Recording(), Recording()
    with engine_for("data=1") as engine:
        echelon.track(engine, first, folder=tmp_path / "mine")
        for step in range(5):
            engine.step(vectors(step))
            if step == 2:
                engine.save(tmp_path / "saved")
    with engine_for("data=1") as engine:
        engine.load(tmp_path / "saved")
        echelon.track(engine, second, folder=tmp_path / "mine")
        for step in range(3, 7):
            engine.step(vectors(step))
    assert (first.steps(), second.steps()) == ([1, 2, 3, 4, 5], [6, 7])
    lines = map(json.loads, (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]


def test_a_tracker_that_fails_ends_no_loop(tmp_path: Path) -> None:
    engine = engine_for("data=1")
    echelon.track(engine, Recording(fails_at=2), folder=tmp_path / "mine")
    assert engine.step(vectors(0)).loss > 0
    with pytest.warns(UserWarning, match="the tracker Recording is off: SystemExit: no network"):
        assert [engine.step(vectors(1)).loss > 0, engine.close()] == [True, None]


def test_a_loop_that_raises_leaves_a_failed_run(tmp_path: Path) -> None:
    recording = Recording()
    with pytest.raises(ZeroDivisionError), engine_for("data=1") as engine:  # noqa: PT012
        echelon.track(engine, recording, folder=tmp_path / "mine")
        engine.step(vectors(0))
        raise ZeroDivisionError
    assert recording.calls[-1] == ("end", "failed")
    assert read_run(tmp_path / "mine").about["state"] == "failed"


def test_wrong_trackers_are_refused_with_all_errors(tmp_path: Path) -> None:
    with engine_for("data=1") as engine:
        with pytest.raises(UserError, match=r"2 errors in echelon\.track") as caught:
            echelon.track(engine, "tensorbord", "jsonl", folder=tmp_path / "mine", project="x")
        assert caught.value.errors[1] == "project: are options of one tracker, and 2 are named"
        assert not (tmp_path / "mine").exists()
