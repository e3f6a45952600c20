"""Plain autograd on one device, beside the plan: what it leaves, and what it cannot run."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.audit.test_one_device import (
    Applied,
    Warm,
    deep,
    say,
)


class RaisesForAll(torch.autograd.Function):
    """Its backward pass takes parts of a batch alone."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        if len(gradients[0]) > 4:
            raise ValueError("too many samples")
        return gradients[0]


def failing() -> nn.Module:
    return deep(Applied(RaisesForAll.apply))


def test_a_reference_that_raises_is_a_note_on_every_rank(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(say, "data=2 zero=3 microbatches=2", failing)
    assert first == second
    assert first[0] == first[1]
    assert "the model cannot be run by itself: ValueError: too many samples" in first[1]
