"""Whole runs, small ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.models import load_hf
from echelon.train.events import Evaluated, Event, Sampled, Started, Stepped
from echelon.train.job import DataJob, Job, ModelJob, OptimizerJob
from echelon.train.trainer import train


def small_job(folder: Path, **changes: object) -> Job:
    given: dict[str, object] = {
        "steps": 6,
        "batch": 4,
        "sequence": 16,
        "evaluate_every": 3,
        "evaluate_batches": 1,
        "out": str(folder),
        "model": ModelJob(layers=1, width=32, heads=2),
        "optimizer": OptimizerJob(warmup=2),
    }
    return Job(**(given | changes))  # type: ignore[arg-type]


def losses(summary: dict[str, object]) -> list[float]:
    lines = (Path(str(summary["run"])) / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "step"]


def test_a_run_leaves_everything_it_promises(tmp_path: Path) -> None:
    events: list[Event] = []
    summary = train(small_job(tmp_path), events.append)
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Sampled)
    assert [event.step for event in events if isinstance(event, Stepped)] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events if isinstance(event, Evaluated)] == [3, 6]
    folder = Path(summary["run"])
    assert {path.name for path in folder.iterdir()} >= {"run.json", "loss.svg", "sample.txt", "model"}
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    assert summary["loss"] == losses(summary)[-1]
    assert load_hf(folder / "model").config.num_parameters == summary["parameters"]


def test_the_losses_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    runs = [train(small_job(tmp_path, plan=plan), lambda _: None) for plan in ("data=1", "data=3")]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-4)


def test_a_corpus_smaller_than_a_batch_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    job = small_job(tmp_path / "runs", data=DataJob(source=str(tmp_path / "short.txt")))
    with pytest.raises(UserError, match=r"short\.txt"):
        train(job, lambda _: None)
    assert not (tmp_path / "runs").exists()


def stop_at_the_second_step(event: Event) -> None:
    if isinstance(event, Stepped) and event.step == 2:
        raise UserError("the one who watches has seen enough")


def test_a_run_that_breaks_is_marked_as_failed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seen enough"):
        train(small_job(tmp_path, steps=500), stop_at_the_second_step)
    (folder,) = tmp_path.iterdir()
    kept = json.loads((folder / "run.json").read_text())
    assert kept["state"] == "failed"
    assert "seen enough" in kept["reason"]


def test_under_torchrun_the_ranks_that_are_there_train(tmp_path: Path) -> None:
    settings = [
        "steps=2",
        "batch=4",
        "sequence=16",
        "evaluate_batches=1",
        f"out={tmp_path}",
        "model.layers=1",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--module", "echelon", "train", "--json", *(f"--set={setting}" for setting in settings)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    assert json.loads(done.stdout)["steps"] == 2, "rank 0 alone prints"
