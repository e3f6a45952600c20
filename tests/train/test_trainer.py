"""Whole runs, small ones."""

import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon
from echelon.errors import UserError
from echelon.models import build, load_hf, save_hf
from echelon.plan import Plan
from echelon.train import run
from echelon.train.events import Evaluated, Event, Sampled, Started, Starting, Stepped
from echelon.train.jobs.job import DataJob, Job, ModelJob, OptimizerJob
from echelon.train.jobs.job_rules import job_errors
from echelon.train.trainer import train, with_chosen_plan


def small_job(folder: Path, **changes: object) -> Job:
    defaults: dict[str, object] = {
        "steps": 6,
        "batch": 4,
        "sequence": 16,
        "evaluate_every": 3,
        "evaluate_batches": 1,
        "out": str(folder),
        "model": ModelJob(layers=1, width=32, heads=2),
        "optimizer": OptimizerJob(warmup=2),
    }
    return Job(**(defaults | changes))  # type: ignore[arg-type]


def losses(summary: dict[str, object]) -> list[float]:
    lines = (Path(str(summary["run"])) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "step"]


def test_a_run_leaves_everything_it_promises(tmp_path: Path) -> None:
    events: list[Event] = []
    summary = train(small_job(tmp_path), events.append)
    assert isinstance(events[0], Starting)
    assert isinstance(events[1], Started)
    assert isinstance(events[-1], Sampled)
    assert [event.step for event in events if isinstance(event, Stepped)] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events if isinstance(event, Evaluated)] == [3, 6]
    folder = Path(summary["run"])
    assert {path.name for path in folder.iterdir()} >= {"run.json", "loss.svg", "sample.txt", "model"}
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert about["state"] == "finished"
    assert about["versions"] == {
        "echelon": echelon.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    assert about["pid"] == os.getpid()
    assert summary["loss"] == losses(summary)[-1]
    assert [each["name"] for each in summary["audit"]] == ["finite weights", "gradients"]
    assert {each["outcome"] for each in summary["audit"]} == {"held"}
    assert load_hf(folder / "model").config.num_parameters == summary["parameters"]


def test_the_losses_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    runs = [train(small_job(tmp_path, plan=plan), lambda _: None) for plan in ("data=1", "data=3")]
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-4)


def test_a_corpus_smaller_than_a_batch_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    job = small_job(tmp_path / "runs", data=DataJob(source=str(tmp_path / "short.txt")))
    with pytest.raises(UserError, match=r"short\.txt"):
        train(job, lambda _: None)
    assert not (tmp_path / "runs").exists()


def text_job(folder: Path, characters: int, **changes: object) -> Job:
    (folder / "some.txt").write_text("abcdefgh" * (characters // 8), encoding="utf-8")
    return small_job(folder / "runs", data=DataJob(source=str(folder / "some.txt")), steps=2, **changes)


def evaluations(job: Job) -> tuple[list[Event], dict[str, Any]]:
    events: list[Event] = []
    summary = train(job, events.append)
    return [event for event in events if isinstance(event, Evaluated)], summary


def test_a_short_validation_split_makes_a_smaller_batch(tmp_path: Path) -> None:
    # 5% of 1000 bytes are 3 windows of 16, and a training batch has 4 samples: that was refused.
    seen, summary = evaluations(text_job(tmp_path, 1000))
    assert len(seen) == 1
    assert summary["validation_loss"] == seen[0].loss


def test_without_a_sample_for_each_replica_there_is_no_validation(tmp_path: Path) -> None:
    seen, summary = evaluations(text_job(tmp_path, 560))  # 28 bytes: one window for two replicas
    assert (seen, summary["validation_loss"]) == ([], None)


def test_validation_can_be_left_out(tmp_path: Path) -> None:
    seen, summary = evaluations(small_job(tmp_path, steps=2, data=DataJob(validation_fraction=0)))
    assert (seen, summary["validation_loss"]) == ([], None)


def test_a_plan_that_the_model_cannot_run_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no experts that ranks can share out"):
        train(small_job(tmp_path / "runs", plan="data=2 expert=2"), lambda _: None)
    assert not (tmp_path / "runs").exists()


def test_a_training_that_diverges_says_so(tmp_path: Path) -> None:
    # It went on to the end and was marked as finished, with NaN in its files.
    optimizer = OptimizerJob(name="sgd", learning_rate=1e30, clip=None, warmup=0)
    with pytest.raises(UserError, match=r"became (NaN|infinite) at step \d+; lower optimizer.learning_rate"):
        train(small_job(tmp_path, steps=50, optimizer=optimizer), lambda _: None)
    (folder,) = tmp_path.iterdir()
    kept = json.loads((folder / "run.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert kept["state"] == "failed"
    assert "optimizer.learning_rate (now 1e+30), or set optimizer.clip=1.0" in kept["reason"]
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)


def job_whose_validation_meets_a_nan(folder: Path) -> Job:
    """The embedding of Z is NaN. Z is only in the end of the corpus, which is kept for validation."""
    model = build(ModelJob(preset="llama-tiny", layers=1, width=32, heads=2, ffn=64).config())
    with torch.no_grad():
        model.embedding.tokens.weight[ord("Z")] = math.nan
    save_hf(model, folder / "weights")
    (folder / "some.txt").write_text("abcdefgh" * 100 + "aZ" * 100, encoding="utf-8")
    data = DataJob(source=str(folder / "some.txt"), validation_fraction=0.2)
    return small_job(
        folder / "runs",
        data=data,
        model=ModelJob(weights=str(folder / "weights")),
        evaluate_every=2,
        audit="off",  # which would find it before the first step
    )


def test_a_validation_loss_of_nan_ends_the_run_and_is_reported(tmp_path: Path) -> None:
    # The check of the validation loss could be deleted, and no test failed.
    events: list[Event] = []
    with pytest.raises(UserError, match="the validation loss became NaN at step 2; lower optimizer"):
        train(job_whose_validation_meets_a_nan(tmp_path), events.append)
    assert [event.step for event in events if isinstance(event, Stepped)] == [1, 2]
    assert all(math.isfinite(event.loss) for event in events if isinstance(event, Stepped))
    (evaluated,) = (event for event in events if isinstance(event, Evaluated))
    assert math.isnan(evaluated.loss), "whoever watches is shown the number"
    (folder,) = (tmp_path / "runs").iterdir()
    about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert about["state"] == "failed"
    assert "the validation loss became NaN at step 2" in about["reason"]
    assert "summary" not in about
    assert not (folder / "model").exists()
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1]) == {"kind": "evaluation", "step": 2, "loss": None}


def test_a_run_that_never_began_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder with run.json was left behind by every plan that the ranks refused.
    def refuse(*_: object) -> None:
        raise UserError("no room for a logbook")

    monkeypatch.setattr(run, "Logbook", refuse)
    with pytest.raises(UserError, match="no room"):
        train(small_job(tmp_path / "new" / "runs"), lambda _: None)
    assert list(tmp_path.iterdir()) == []


def refuse_to_start(event: Event) -> None:
    if isinstance(event, Starting):
        raise UserError("this plan cannot run")


def test_an_error_before_the_first_step_removes_the_folder_but_no_other_run(tmp_path: Path) -> None:
    (tmp_path / "earlier").mkdir()
    with pytest.raises(UserError, match="cannot run"):
        train(small_job(tmp_path), refuse_to_start)
    assert [path.name for path in tmp_path.iterdir()] == ["earlier"]


def stop_at_the_second_step(event: Event) -> None:
    if isinstance(event, Stepped) and event.step == 2:
        raise UserError("the one who watches has seen enough")


def test_a_run_that_breaks_is_marked_as_failed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seen enough"):
        train(small_job(tmp_path, steps=500), stop_at_the_second_step)
    (folder,) = tmp_path.iterdir()
    kept = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert kept["state"] == "failed"
    assert "seen enough" in kept["reason"]
    assert "<svg" in (folder / "loss.svg").read_text(encoding="utf-8"), "of the steps that there were"


@pytest.mark.slow
def test_under_torchrun_the_ranks_that_are_there_train(tmp_path: Path) -> None:
    settings = [
        "steps=2",
        "batch=4",
        "sequence=16",
        "evaluate_batches=1",
        "model.layers=1",
        f"out={tmp_path}",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--module", "echelon", "train", *(f"--set={setting}" for setting in settings)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "run.json").read_text(encoding="utf-8"))["state"] == "finished"
    assert done.stdout.count("echelon train") == 1, "rank 0 alone prints"
    assert done.stdout.count("the run is in") == 1
    assert done.stdout.count("echelon report ") == 1


def test_a_job_that_says_its_plan_stays() -> None:
    assert with_chosen_plan(Job()) == (Job(), "")


def test_a_job_gets_a_plan_for_so_many_ranks() -> None:
    job, why = with_chosen_plan(Job(plan="auto ranks=2 memory=100MiB", batch=8))
    assert Plan.parse(job.plan).ranks == 2
    assert job_errors(job) == []
    assert f'plan="{job.plan}"' in why
    assert replace(job, plan="") == Job(plan="", batch=8)


def test_other_errors_come_first_and_all_of_them() -> None:
    with pytest.raises(UserError) as caught:
        with_chosen_plan(Job(plan="auto", steps=0, model=ModelJob(preset="gpt-tinny")))
    assert len(caught.value.errors) == 2
    with pytest.raises(UserError, match="must be one of"):
        with_chosen_plan(Job(plan="auto precision=9"))
    with pytest.raises(UserError, match="for images say a plan"):
        with_chosen_plan(Job(plan="auto", task="images", batch=4))
