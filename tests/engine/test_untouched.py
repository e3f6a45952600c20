"""Forward passes that leave no trace, and generators of random numbers that were drawn from."""

import random

import numpy
import pytest
import torch
from torch import Tensor, nn

from echelon.engine.untouched import GeneratorStates, untouched

HOST = torch.device("cpu")


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.calls, self.removed = 0, "there"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.added = x
        del self.removed
        self.training = False
        return x


def test_modes_attributes_and_buffers_come_back() -> None:
    module = Changing()
    count = module.count
    with untouched([module], [module], HOST):
        module(torch.ones(1))
        assert module.calls == 1
    assert (module.calls, module.removed, module.training) == (0, "there", True)
    assert not hasattr(module, "added")
    assert module.count is count
    assert count.tolist() == [0, 0]


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1), random.random, lambda: numpy.random.rand(), lambda: numpy.random.randn()],
)
def test_draws_are_seen_and_undone(draw: object) -> None:
    assert callable(draw)
    before = GeneratorStates.now(HOST)
    assert not before.moved(HOST)
    with untouched([], [], HOST):
        draw()
        assert before.moved(HOST)
    assert not before.moved(HOST)
