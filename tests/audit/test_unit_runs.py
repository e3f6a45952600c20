"""Runs of a unit: whether it drew random numbers."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn

from echelon.audit.arguments import copy_arguments
from echelon.audit.unit_runs import gradients_of, run


class Jitter(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw, self.own = draw, random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.draw()


def has_drawn(module: nn.Module) -> bool:
    arguments = copy_arguments((torch.ones(2),), {}, lambda tensor: tensor)
    return run(module, arguments, [nn.Sequential(module)]).has_drawn


@pytest.mark.parametrize(
    "draw", [lambda: float(torch.rand(())), random.random, lambda: float(numpy.random.rand())]
)
def test_draws_from_all_global_generators_count(draw: Callable[[], float]) -> None:
    # Python's and numpy's did not: a right table was refused, because both runs drew something else.
    assert has_drawn(Jitter(draw))
    assert not has_drawn(Jitter(lambda: 1.0))


def test_draws_from_a_generator_of_a_module_count() -> None:
    module = Jitter(lambda: 1.0)
    module.draw = module.own.random
    assert has_drawn(module)


def test_hooks_on_weights_are_left_out_of_the_comparison_and_stay() -> None:
    # They ran for the weights of the plan alone, and a right table was refused.
    weight = nn.Parameter(torch.ones(2))
    handle = weight.register_hook(lambda gradient: gradient * 10)
    output = weight * 3
    (gradient,) = gradients_of([weight], [output], [torch.ones(2)])
    assert gradient.tolist() == [3, 3]
    (weight * 3).sum().backward()
    handle.remove()
    (weight * 3).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [33, 33]
