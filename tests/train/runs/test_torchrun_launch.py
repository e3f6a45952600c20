"""Ranks of torchrun that are started again: the run that they go on with, or that has finished."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from echelon.train import trainer
from echelon.train.jobs.job import Job, as_plain
from echelon.train.trainer import LaunchedRun, run_of_launch

SUMMARY = {"run": "a", "steps": 3}


@pytest.fixture(autouse=True)
def _under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


def write_run(job: Job, /, **changes: Any) -> Path:
    path = Path(job.out) / f"{job.name}-20261117-000000"
    path.mkdir(parents=True)
    about = {"state": "finished", "summary": SUMMARY, "launch": ["host 7 1"], "job": as_plain(job), "pid": -1}
    (path / "run.json").write_text(json.dumps(about | changes), encoding="utf-8")
    return path


def test_a_run_goes_on_and_a_finished_one_has_its_summary(tmp_path: Path) -> None:
    job, other = Job(name="a", out=str(tmp_path)), Job(name="b", out=str(tmp_path))
    path = write_run(job)
    assert run_of_launch(job, ["host 7 1"]) == LaunchedRun(path, SUMMARY)
    assert run_of_launch(job, ["host 8 1"]) is None, "another launch"
    assert run_of_launch(other, ["host 7 1"]) is None
    path = write_run(other, state="running")
    assert run_of_launch(other, ["host 7 1"]) == LaunchedRun(path, None)


@pytest.mark.parametrize("changes", [{"pid": os.getpid()}, {"job": {"steps": 5}}, {"summary": None}])
def test_a_script_may_train_again(tmp_path: Path, changes: dict[str, Any]) -> None:
    job = Job(name="a", out=str(tmp_path))
    write_run(job, **changes)
    assert run_of_launch(job, ["host 7 1"]) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    job = Job(name="a", out=str(tmp_path))
    path = write_run(job)
    monkeypatch.setattr(trainer, "join", lambda: None)
    monkeypatch.setattr(trainer, "is_under_torchrun", lambda: True)
    monkeypatch.setattr(trainer, "check", lambda _: None)
    monkeypatch.setattr(trainer, "agree_on_every_rank", lambda *_: ["host 7 1"])
    monkeypatch.setattr(trainer, "decide_on_rank_0", lambda decide: decide())
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    shown: list[Any] = []
    assert trainer.train(job, shown.append) == ({} if rank else SUMMARY)
    assert str(path) in shown[0].text
    assert list(tmp_path.iterdir()) == [path], "no other run"
