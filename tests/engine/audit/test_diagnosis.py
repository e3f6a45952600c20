"""What an error of the audit says: which gradients differ, and what is to blame."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.cases import mean_loss
from tests.engine.audit.test_one_device import CLASSES, PLANS, WIDTH, Applied, Warm, deep, say


class CentredGradient(torch.autograd.Function):
    """Nothing but gradients tells that samples are mixed."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(0)


def centring() -> nn.Module:
    return deep(Applied(CentredGradient.apply))


def mixing() -> nn.Module:
    return deep(nn.Softmax(0))


class Sized(nn.Module):
    """Has a weight that only parts of a batch use: for all of it, one device makes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift if len(x) <= 2 else x


def sized() -> nn.Module:
    return deep(Sized())


def weighted_loss(output: Tensor, targets: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 5.0, 0.2, 1.0, 2.0], dtype=output.dtype)
    return F.cross_entropy(output, targets, weight=weights)


class Tied(nn.Module):
    """Every block is called twice, inside a reentrant checkpoint: gradients come in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(WIDTH, WIDTH), deep()[:7], nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.blocks, hidden, use_reentrant=True)
        output: Tensor = self.last(hidden)
        return output


def test_a_gradient_in_parts_is_named(warm_ranks: Warm) -> None:
    for said in warm_ranks(2).run(say, "data=2 zero=3", Tied):
        assert said[0] == "finite weights: held; gradients: held"
        assert "the gradient of blocks.6.0.bias comes in several parts" in said[1]


WRONG = [
    (PLANS[0], centring, mean_loss, "The backward pass mixes samples"),
    (PLANS[1], centring, mean_loss, "The backward pass mixes samples"),
    (PLANS[0], mixing, mean_loss, "The model mixes samples"),
    (PLANS[0], deep, weighted_loss, "The loss does not add up over samples"),
    (
        PLANS[0],
        sized,
        mean_loss,
        "4.shift where it has none",
    ),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("plan", "make", "loss", "words"), WRONG)
def test_the_error_is_that_of_a_model_that_fits(
    warm_ranks: Warm, plan: str, make: Callable[[], nn.Module], loss: Any, words: str
) -> None:
    first, second = warm_ranks(2).run(say, plan, make, loss)
    assert first == second
    assert first[0] == first[1]
    assert words in first[1]
