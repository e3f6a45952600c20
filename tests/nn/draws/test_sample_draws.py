"""Whose draws are made by sample, under which key, and who is named where they cannot be."""

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from echelon.nn.draws.sample_draws import SampleDraws
from echelon.nn.dropout.training_position import current, restore, scope


class Noise(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Any] = torch.randn_like) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x) + x * 0


def run(model: nn.Module, draws: SampleDraws, step: int = 0) -> Tensor:
    with scope(seed=0, step=step, first_sample=0, samples=4, draws=draws):
        drawn: Tensor = model(torch.zeros(4, 3, dtype=torch.float64))
    return drawn


def test_keys_are_names_of_modules_and_not_the_order_of_their_draws() -> None:
    model = nn.Sequential(Noise(), Noise())
    draws = SampleDraws(model)
    first, second = (run(layer, draws) for layer in model)
    assert not torch.equal(first, second)
    assert torch.equal(run(model[1], draws), second)  # as on a stage without the first layer
    copied = copy.deepcopy(model)
    assert torch.equal(run(copied[1], SampleDraws(copied)), second)


def test_one_module_draws_other_numbers_each_time() -> None:
    model = Noise(lambda x: torch.stack([torch.randn_like(x), torch.randn_like(x)]))
    one, other = run(model, SampleDraws(model))
    assert not torch.equal(one, other)


def test_a_hook_and_a_function_in_place_of_forward_draw_for_their_module() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity())
    for layer in model:
        layer.register_forward_hook(lambda *call: call[2] + torch.randn_like(call[2]))
        layer.forward = lambda x: x + torch.randn_like(x)
    draws = SampleDraws(model)
    first, second = (run(layer, draws) for layer in model)
    assert not torch.equal(first, second)
    assert torch.equal(run(model[1], draws), second)


def test_a_second_run_draws_the_same() -> None:
    model = nn.Sequential(Noise(), Noise())
    draws = SampleDraws(model)
    with scope(seed=0, step=0, first_sample=0, samples=4, draws=draws):
        model[0](torch.zeros(4, 3))
        place = current()
        drawn = model(torch.zeros(4, 3))
    with restore(place):
        assert torch.equal(model(torch.zeros(4, 3)), drawn)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda _: torch.from_numpy(numpy.random.randn(4, 3)), "numpy.random in 0"),
        (lambda x: x + random.random(), "random in 0"),
        (
            lambda _: torch.randn(4, 3, generator=torch.Generator(), dtype=torch.float64),
            "torch's randn with a generator in 0",
        ),
        (lambda x: nn.init.normal_(torch.empty_like(x)), "torch's normal_ in 0"),
        (lambda x: torch.manual_seed(20873) and torch.randn_like(x), "torch's randn_like in 0"),
        (lambda x: checkpoint(torch.dropout, x + 1, 0.5, True, use_reentrant=False), "torch's dropout in 0"),
    ],
)
def test_draws_that_belong_to_no_sample_are_named_once(draw: Callable[[Tensor], Any], name: str) -> None:
    model = nn.Sequential(Noise(draw), nn.Linear(3, 3))
    draws = SampleDraws(model, warns=True)
    state, numpy_state, python_state = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in range(3):
                run(model.double(), draws, step)
    finally:
        torch.set_rng_state(state)
        numpy.random.set_state(numpy_state)
        random.setstate(python_state)
    assert list(draws.foreign) == [name]
    assert [str(each.message).split(" draws ")[0] for each in warned] == [name]


def test_gradients_of_a_checkpointed_draw_are_those_of_its_forward() -> None:
    """torch draws it again from its own generator, which must have drawn it the first time."""
    x = torch.ones(4, 3, requires_grad=True)
    model = Noise(lambda x: checkpoint(F.dropout, x, 0.5, use_reentrant=False))
    with scope(seed=0, step=0, first_sample=0, samples=4, draws=SampleDraws(model)):
        drawn = model(x)
    drawn.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, drawn.detach())


def test_compiled_code_is_not_looked_into() -> None:
    model = Noise(torch.compile(lambda x: x * 2 + 1, backend="eager", fullgraph=True))
    draws = SampleDraws(model)
    assert bool((run(model, draws) == 1).all())
