"""Optimizers by the names of job files: their settings, and which weights are decayed."""

import pytest
import torch
from torch import nn

from echelon.train.jobs.job import OptimizerJob
from echelon.train.jobs.job_rules import OPTIMIZERS
from echelon.update.optim import SM3, Adafactor
from echelon.update.optim.optimizers import make_optimizer


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (3,), (4, 4), (1,))]


KINDS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": Adafactor, "sm3": SM3}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_matrices_are_decayed_and_vectors_are_not(name: str, kind: type) -> None:
    optimizer = make_optimizer(OptimizerJob(name=name, learning_rate=0.5, weight_decay=0.2), parameters())
    assert type(optimizer) is kind
    matrices, vectors = optimizer.param_groups
    assert [p.dim() for p in matrices["params"]] == [2, 2]
    assert [p.dim() for p in vectors["params"]] == [1, 1]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)
    assert matrices["lr"] == vectors["lr"] == 0.5


def test_each_optimizer_takes_the_settings_that_are_its_own() -> None:
    job = OptimizerJob(name="adamw", betas=(0.5, 0.75), momentum=0.25)
    assert make_optimizer(job, parameters()).param_groups[0]["betas"] == (0.5, 0.75)
    for name in ("sgd", "sm3"):
        job = OptimizerJob(name=name, betas=(0.5, 0.75), momentum=0.25)
        assert make_optimizer(job, parameters()).param_groups[0]["momentum"] == 0.25


def test_every_optimizer_of_job_files_is_made() -> None:
    assert set(KINDS) == set(OPTIMIZERS)


def test_parameters_may_come_from_a_generator() -> None:
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(OptimizerJob(), model.parameters())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


def test_kernels_and_the_least_moments() -> None:
    for name in ("adamw", "sgd"):
        assert make_optimizer(OptimizerJob(name=name), parameters()).param_groups[0]["fused"] is True
    adafactor = make_optimizer(OptimizerJob(name="adafactor"), parameters())
    assert adafactor.param_groups[0]["eps"] == (2**-23, 1e-3), "of float32, whatever the weights are"
