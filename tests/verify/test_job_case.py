"""The verification case of a job."""

import dataclasses
from pathlib import Path

import pytest
import torch

from echelon.errors import UserError
from echelon.models import build, save_hf
from echelon.nn.batch import microbatches, num_samples, take_part
from echelon.plan import Plan
from echelon.train.jobs.job import DataJob, Job, ModelJob
from echelon.verify import job_case
from echelon.verify.job_case import case_of
from tests.data.image_files import two_classes


@pytest.mark.parametrize(
    "text", ["data=2", "data=3 microbatches=2", "data=4 microbatches=4", "microbatches=7"]
)
def test_replicas_and_microbatches_are_uneven_and_none_is_empty(text: str) -> None:
    # With even parts, a mean of means is right by accident, and the proof proves less than it says.
    plan = Plan.parse(text)
    batch = case_of(Job(), plan, 1).make_batch(0)
    replicas = [take_part(batch, index, plan.data) for index in range(plan.data)]
    parts = [
        part for replica in replicas for part, _ in microbatches(replica, plan.microbatches, always=False)
    ]
    sizes = [num_samples(part) for part in parts]
    assert len(sizes) == plan.data * plan.microbatches
    assert (min(sizes), max(sizes)) == (min(sizes), min(sizes) + 1)
    assert sum(sizes) >= 8


def test_the_weights_of_the_job_are_what_is_verified(tmp_path: Path) -> None:
    model = build(dataclasses.replace(ModelJob().config(), layers=1))
    torch.nn.init.constant_(next(model.parameters()), 0.5)
    save_hf(model, tmp_path / "hf")
    case = case_of(Job(model=ModelJob(weights=str(tmp_path / "hf"))), Plan(data=2), 1)
    assert torch.equal(next(case.build().parameters()), next(model.parameters()).double())


def test_it_trains_on_the_training_split_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a" * 2000 + "b" * 2000, encoding="utf-8")
    data = DataJob(source=str(tmp_path / "text.txt"), validation_fraction=0.5)
    case = case_of(Job(data=data), Plan(data=2), 1)
    assert all((case.make_batch(step)[1] == ord("a")).all() for step in range(10))


def test_a_corpus_too_short_to_verify_is_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a" * 200, encoding="utf-8")
    job = Job(batch=2, data=DataJob(source=str(tmp_path / "text.txt")))
    with pytest.raises(UserError, match=r"text\.txt"):
        case_of(job, Plan(data=2), 1)


def test_a_model_whose_proof_does_not_fit_is_refused_before_a_rank_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The training fits, but the proof holds whole models in float64: its ranks, and a device of its own.
    parameters = Job().model.config().num_parameters
    monkeypatch.setattr(job_case, "available_memory", lambda: 8 * 7 * parameters - 1)
    with pytest.raises(UserError, match=r"in float64 take at least 45\.0 MiB on 2 ranks and one device, and"):
        case_of(Job(), Plan(data=2, zero=3), steps=1)
    monkeypatch.setattr(job_case, "available_memory", lambda: 8 * 7 * parameters)
    assert case_of(Job(), Plan(data=2, zero=3), steps=1).steps == 1
    with pytest.raises(UserError, match="on 8 ranks"):
        case_of(Job(), Plan(data=8, zero=3), steps=1)


def test_a_job_of_images_is_verified_on_its_images_with_its_classes(tmp_path: Path) -> None:
    root = two_classes(tmp_path, 8)
    data = DataJob(source=str(root), validation_fraction=0.0, augment=False)
    job = Job(task="images", model=ModelJob(preset="nin-tiny", dropout=0.2), data=data)
    case = case_of(job, Plan(data=2), 1)
    images, labels = case.make_batch(0)
    assert case.build()(images.double()).shape == (9, 2)
    red = images[:, 0].amax((1, 2)) > 0
    assert torch.equal(red, labels == 0)
