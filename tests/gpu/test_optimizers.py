"""Adafactor, SM3 and optimizers of whole parameters on a GPU: right, and without a wait for the device."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import echelon
from echelon.launching import Ranks
from echelon.models import build, cross_entropy
from echelon.update.optim import SM3, Adafactor
from tests.gpu.nccl import environment
from tests.gpu.test_no_sync import CONFIG, batch, steps_without_waiting
from tests.update.optim import whole_cases
from tests.update.optim.parts import random_gradients, random_parameters, set_gradients, worst

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS = {"adafactor": partial(Adafactor, lr=1e-2), "sm3": partial(SM3, lr=1e-2, momentum=0.9)}
SHAPES = [(64, 48), (33,), (), (3, 5, 7), (1, 9)]


def train(make: Callable[..., torch.optim.Optimizer], device: str) -> list[Tensor]:
    """The parameters after ten updates with gradients that are the same on every device."""
    whole = random_parameters(SHAPES)
    parameters: list[Any] = [p.detach().to(device).requires_grad_() for p in whole]
    optimizer = make(parameters)
    for step in range(10):
        gradients = random_gradients(whole, step)
        set_gradients(parameters, [None if g is None else g.to(device) for g in gradients])
        optimizer.step()
    return [p.detach().cpu() for p in parameters]


@pytest.mark.parametrize("name", KINDS)
def test_updates_are_those_of_the_cpu(name: str) -> None:
    assert worst(train(KINDS[name], "cuda"), train(KINDS[name], "cpu")) < 1e-12


def test_adafactor_is_torch_s() -> None:
    assert worst(train(Adafactor, "cuda"), train(torch.optim.Adafactor, "cuda")) < 1e-12


@pytest.mark.parametrize("plan", ["data=1", "data=1 precision=bf16 microbatches=2", "data=1 precision=fp64"])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_of_one_rank_waits_for_nothing(name: str, plan: str) -> None:
    assert len(steps_without_waiting(plan, KINDS[name])) == 3


@pytest.fixture(scope="module")
def nccl() -> Iterator[Ranks]:
    with Ranks(2, backend="nccl", deadline=120.0, environment=environment) as ranks:
        yield ranks


def steps_of(plan: str, name: str) -> list[float]:
    return steps_without_waiting(plan, KINDS[name])


@pytest.mark.parametrize("plan", ["data=2 zero=1", "data=2 zero=3 precision=bf16", "tensor=2"])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_of_two_ranks_waits_for_nothing(nccl: Ranks, name: str, plan: str) -> None:
    first, second = nccl.run(steps_of, plan, name)
    assert first == second


def losses_of(plan: str, name: str) -> list[float]:
    torch.manual_seed(0)
    make = partial(whole_cases.make_optimizer, name)
    with echelon.parallelize(build(CONFIG), plan, optimizer=make, loss=cross_entropy) as engine:
        return [engine.step(engine.local(batch(step))).loss for step in range(4)]


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_whole_parameters_are_updated_over_nccl(nccl: Ranks, name: str) -> None:
    expected = losses_of("data=1 precision=fp64", name)
    for plan in ("data=2 zero=1 precision=fp64", "tensor=2 precision=fp64"):
        for losses in nccl.run(losses_of, plan, name):
            assert losses == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_a_refused_step_changes_nothing(name: str) -> None:
    torch.manual_seed(0)
    engine = echelon.parallelize(build(CONFIG), "data=1", optimizer=KINDS[name], loss=cross_entropy)
    for step in range(2):
        engine.step(batch(step))
    before = [each.tensor.clone() for each in (*engine._update.owned(), *engine._update.owned_whole())]
    inputs, targets = batch(2)
    engine.step((inputs, torch.full_like(targets, -100)))
    after = [each.tensor for each in (*engine._update.owned(), *engine._update.owned_whole())]
    assert all(map(torch.equal, after, before))
