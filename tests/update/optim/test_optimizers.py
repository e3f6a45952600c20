"""Optimizers by the names of job files: their settings, and which weights are decayed."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from echelon.errors import UserError
from echelon.train.jobs.job import OptimizerJob
from echelon.train.jobs.job_rules import OPTIMIZERS
from echelon.update.optim import SM3, Adafactor, CombinedOptimizer, Need, cosine
from echelon.update.optim.learning_rate import LearningRate
from echelon.update.optim.needs import need_of
from echelon.update.optim.optimizers import make_optimizer
from echelon.update.optim.sum_optimizer import Exchange
from tests.update.optim.parts import random_parameters, set_gradients


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


def make() -> tuple[list[Any], CombinedOptimizer]:
    parameters = random_parameters([(3, 4), (5,)])
    muon, adamw = torch.optim.Muon(parameters[:1], lr=0.2), torch.optim.AdamW(parameters[1:], lr=0.1)
    return parameters, CombinedOptimizer([muon, adamw])


def step(optimizer: torch.optim.Optimizer, parameters: list[Any]) -> None:
    set_gradients(parameters, [torch.ones_like(p) for p in parameters])
    optimizer.step()


def test_each_updates_its_own_parameters() -> None:
    parameters, combined = make()
    reference, _ = make()
    others = [torch.optim.Muon(reference[:1], lr=0.2), torch.optim.AdamW(reference[1:], lr=0.1)]
    for _ in range(3):
        step(combined, parameters)
        for other in others:
            step(other, reference)
    assert all(map(torch.equal, parameters, reference))
    assert [set(combined.state[p]) for p in parameters] == [
        {"momentum_buffer"},
        {"step", "exp_avg", "exp_avg_sq"},
    ]


def test_a_schedule_sets_the_rate_of_each() -> None:
    parameters, combined = make()
    LearningRate(combined, cosine(total=10, warmup=2)).set(0)
    assert [group["lr"] for optimizer in combined.optimizers for group in optimizer.param_groups] == [
        0.1,
        0.05,
    ]
    scheduler = torch.optim.lr_scheduler.ConstantLR(combined, factor=0.5)
    step(combined, parameters)
    scheduler.step()
    assert combined.optimizers[0].param_groups[0]["lr"] == 0.05


def test_state_that_was_saved_is_loaded_into_each() -> None:
    parameters, combined = make()
    step(combined, parameters)
    others, again = make()
    again.load_state_dict(combined.state_dict())
    again.param_groups[0]["lr"] = 0.7
    step(again, others)
    assert float(again.optimizers[1].state[others[1]]["step"]) == 2
    assert again.optimizers[0].param_groups[0]["lr"] == 0.7


def test_it_needs_the_most_that_one_of_them_does() -> None:
    first, second = random_parameters([(3, 4), (2, 2)])

    def need(one: Any, other: Any) -> Need | None:
        return need_of(CombinedOptimizer([one([first]), other([second])]))

    assert need(torch.optim.SGD, torch.optim.AdamW) is Need.ELEMENT
    assert need(torch.optim.SGD, Adafactor) is Need.SUMS
    assert need(torch.optim.Muon, SM3) is Need.WHOLE
    assert need(torch.optim.Muon, type("Unknown", (torch.optim.SGD,), {})) is None


def test_a_parameter_belongs_to_one_of_them() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(UserError, match="1 parameters are in several"):
        CombinedOptimizer([torch.optim.SGD([weight]), torch.optim.Muon([weight])])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_is_one_of_its_own(copied: Callable[[Any], Any]) -> None:
    parameters, combined = make()
    step(combined, parameters)
    before = copy.deepcopy(parameters)
    other = copied(combined)
    others = [p for group in other.param_groups for p in group["params"]]
    step(other, others)
    assert all(map(torch.equal, parameters, before)), "those of the copy alone are updated"
    step(combined, parameters)
    assert all(map(torch.equal, others, parameters))
    assert all(each.state is other.state for each in other.optimizers)


def test_groups_cannot_be_added() -> None:
    """They would be in no optimizer, and never be updated."""
    _, combined = make()
    with pytest.raises(UserError, match="which of its 2 optimizers"):
        combined.add_param_group({"params": random_parameters([(2,)])})


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    parameters, combined = make()
    set_gradients(parameters, [torch.ones_like(p) for p in parameters])
    calls = []
    assert combined.step(lambda: calls.append(1) or 7.0) == 7.0
    assert (len(calls), combined.step()) == (1, None)


def test_state_that_an_optimizer_has_made_already_is_kept() -> None:
    parameters = random_parameters([(3, 4), (5,)])
    adagrad = torch.optim.Adagrad(parameters[1:], initial_accumulator_value=0.5)
    made = dict(adagrad.state[parameters[1]])
    combined = CombinedOptimizer([torch.optim.SGD(parameters[:1]), adagrad])
    assert combined.state[parameters[1]] == made
    assert all(each.state is combined.state for each in combined.optimizers)
    assert [g for each in combined.optimizers for g in each.param_groups] == combined.param_groups


def test_state_of_whole_tensors_is_that_of_those_which_share() -> None:
    first, second = random_parameters([(3, 4), (2, 2)])
    combined = CombinedOptimizer([Adafactor([first]), torch.optim.SGD([second])])
    assert combined.whole_state == Adafactor.whole_state
    combined.share(Exchange([(3, 4)], {}, (), torch.float64, torch.device("cpu")))
    assert combined.optimizers[0].uses_up_gradients  # type: ignore[attr-defined]
    assert CombinedOptimizer([torch.optim.SGD([first])]).whole_state == frozenset()
