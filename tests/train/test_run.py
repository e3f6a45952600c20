"""A run that an error ends: what is said of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from echelon.engine.audit import held, skipped
from echelon.train.events import Audited, Evaluated, Limited, Sampled, Started, Starting, Stepped
from echelon.train.jobs.job import Job
from echelon.train.run import Logbook, open_run
from echelon.train.runs.run_folder import RunFolder


@pytest.mark.parametrize(
    ("steps", "done"), [(0, "no step was made"), (1, "step 1 was the last"), (2, "step 2 was the last")]
)
def test_an_interrupted_run_says_how_far_it_came(tmp_path: Path, steps: int, done: str) -> None:
    opened = open_run(Job(out=str(tmp_path)), lambda _: None)
    with pytest.raises(KeyboardInterrupt) as caught, opened as run:  # noqa: PT012
        for step in range(1, steps + 1):
            run.take(stepped(step, 2.5, 0.25))
        raise KeyboardInterrupt
    assert caught.value.__notes__ == [f"{done}; the run is in {run.folder.path}"]


def stepped(step: int, loss: float, seconds: float, memory: int = 100) -> Stepped:
    return Stepped(step, loss, 0.5, 1e-3, 1000, seconds, 7, 0.2, 0.1, memory)


def logged(folder: Path, *evaluations: Evaluated) -> tuple[RunFolder, dict[str, Any]]:
    run = RunFolder.create(folder, "a", {})
    logbook = Logbook(run)
    logbook.take(Starting("runs/a"))
    logbook.take(Started(42, 9000, "stdlib", "cpu"))
    logbook.take(Audited((held("samples"), skipped("layers", "no memory"))))
    for step in (stepped(1, 5.0, 2.0), stepped(2, 4.0, 0.5, memory=300), stepped(3, 3.0, 1.0)):
        logbook.take(step)
    for evaluation in evaluations:
        logbook.take(evaluation)
    logbook.take(Sampled("def f"))
    logbook.close()
    return run, logbook.summary()


def test_a_run_without_a_step_has_no_picture(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, "a", {})
    logbook = Logbook(run)
    logbook.take(Starting("runs/a"))
    assert (logbook.has_started, logbook.last_step) == (False, 0)
    logbook.take(Started(42, 9000, "stdlib", "cpu"))
    logbook.close()
    assert (logbook.has_started, logbook.last_step) == (True, 0)
    assert not (run.path / "loss.svg").exists()


def test_the_summary_of_a_run(tmp_path: Path) -> None:
    _, summary = logged(tmp_path, Evaluated(2, 4.5), Evaluated(3, 3.5))
    assert summary["parameters"] == 42
    assert (summary["first_loss"], summary["loss"], summary["validation_loss"]) == (5.0, 3.0, 3.5)
    assert summary["tokens"] == 3000
    # The median step: the first one pays for compilation and memory.
    assert (summary["step_seconds"], summary["tokens_per_second"]) == (1.0, 1000.0)
    assert summary["memory_bytes"] == 300
    assert summary["audit"] == [
        {"name": "samples", "outcome": "held", "reason": ""},
        {"name": "layers", "outcome": "skipped", "reason": "no memory"},
    ]
    assert logged(tmp_path)[1]["validation_loss"] is None


def test_every_step_and_evaluation_is_a_line(tmp_path: Path) -> None:
    run, _ = logged(tmp_path, Evaluated(3, 3.5))
    lines = (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    *steps, evaluation = map(json.loads, lines)
    assert [(line["kind"], line["step"], line["loss"]) for line in steps] == [
        ("step", 1, 5.0),
        ("step", 2, 4.0),
        ("step", 3, 3.0),
    ]
    assert steps[0]["moved_bytes"] == 7
    assert evaluation == {"kind": "evaluation", "step": 3, "loss": 3.5}
    assert (run.path / "sample.txt").read_text(encoding="utf-8") == "def f\n"


def test_the_picture_has_a_line_for_validation_where_there_was_one(tmp_path: Path) -> None:
    run, _ = logged(tmp_path)
    assert ">validation<" not in (run.path / "loss.svg").read_text(encoding="utf-8")
    run, _ = logged(tmp_path, Evaluated(3, 3.5))
    picture = (run.path / "loss.svg").read_text(encoding="utf-8")
    assert ">validation<" in picture
    assert "nats per token" in picture


def test_tensorboard_is_written_only_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = logged(tmp_path / "with", Evaluated(3, 3.5))
    assert list((run.path / "tensorboard").iterdir())
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    run, summary = logged(tmp_path / "without")
    assert not (run.path / "tensorboard").exists()
    assert summary["loss"] == 3.0


def test_a_run_whose_time_is_counted_keeps_the_number_of_its_steps(tmp_path: Path) -> None:
    with open_run(Job(out=str(tmp_path), minutes=1.5), lambda _: None) as run:
        run.take(Limited(90, 600, 1.5, 20))
        about = run.folder.about()
        run.take(stepped(1, 2.5, 0.25))
    assert (about["job"]["steps"], about["job"]["optimizer"]["warmup"]) == (90, 20)
    assert "minutes" not in about["job"]
    assert about["events"][0]["text"] == "1.5 minutes: 90 of 600 steps"
