"""Reentrant checkpoints: a backward pass inside of the backward pass, over inputs that are leaves."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon
from echelon.verify import Case, assert_equal
from tests.cases import adamw
from tests.contract_models import class_loss, vectors

pytestmark = [
    pytest.mark.usefixtures("warm_contract"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),  # in evaluation
]


class Block(nn.Module):
    def __init__(self, *, is_inside: bool = False) -> None:
        """`is_inside`: it computes a part of itself again."""
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.is_inside = is_inside

    def forward(self, x: Tensor) -> Tensor:
        if self.is_inside:
            return x + checkpoint(self._inner, x, use_reentrant=True)  # type: ignore[no-any-return]
        return x + self._inner(x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Checkpoints(nn.Module):
    """In a block, around a block, and around two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
        self.blocks = nn.ModuleList(Block(is_inside=number == 0) for number in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        x = checkpoint(self.blocks[1], x, use_reentrant=True)
        x = checkpoint(lambda y: self.blocks[3](self.blocks[2](y)), x, use_reentrant=True)
        return self.last(x)  # type: ignore[no-any-return]


class SharedInCheckpoints(Checkpoints):
    """A weight gets a gradient from each checkpoint, the second when the first may be on its way."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=True)
        return self.last(x)  # type: ignore[no-any-return]


def case_of(model: type[nn.Module]) -> Case:
    options = {"smallest_unit": 0}
    return Case(model, vectors, class_loss, adamw, steps=3, options=options)


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("level", [0, 2, 3])
def test_reentrant_checkpoints_are_equal_to_one_device(level: int) -> None:
    """At zero=3 the unit was left before its weights had got their gradients, and the step was refused."""
    assert_equal(case_of(Checkpoints), f"data=2 zero={level} microbatches=2")


def test_a_weight_in_two_reentrant_checkpoints_is_refused_with_the_fix() -> None:
    with pytest.raises(echelon.UserError, match="use_reentrant=False"):
        assert_equal(case_of(SharedInCheckpoints), "data=2 zero=3")
