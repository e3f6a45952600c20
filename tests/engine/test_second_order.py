"""Gradients of gradients (a penalty on them): as on one device, or one sentence in the first step.

Batch norm trained on wrong ones without a word: its sum over replicas was no part of the graph.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import echelon
from echelon.collectives import Ledger, RecordingGroup
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.parallel.tensor.modules import Column
from echelon.parallel.tensor.regions import Region
from tests.cases import mean_loss, sgd

Warm = Callable[[int], Ranks]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(torch.tanh(self.up(x)))
        return output


class Penalised(nn.Module):
    """Returns its outputs, and the size of their gradients with respect to its input."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.last = Block(), between, Block()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self.last(self.between(self.first(x))).tanh()
            (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.cat([y, gradient.square()], 1)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]  # type: ignore[no-any-return]


class SquareOnce(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Once.apply(x)  # type: ignore[no-untyped-call]


def losses(plan: str, *, norm: bool) -> list[float]:
    torch.manual_seed(0)
    model = Penalised(nn.BatchNorm1d(6) if norm else nn.Identity())
    table = {f"{block}.{name}": word for block in ("first", "last") for name, word in WORDS.items()}
    options: Any = {"tensor_table": table} if "tensor" in plan else {}
    engine = echelon.parallelize(
        model, f"{plan} precision=fp64", optimizer=sgd, loss=mean_loss, audit="off", **options
    )
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8)
    return [engine.step(engine.local(batch)).loss for _ in range(3)]


WORDS = {"up": "column", "down": "row"}


def losses_with_norm(plan: str) -> list[float]:
    return losses(plan, norm=True)


def losses_without_norm(plan: str) -> list[float]:
    return losses(plan, norm=False)


@pytest.mark.parametrize(
    ("plan", "run"),
    [
        ("data=2", losses_with_norm),
        ("tensor=2", losses_without_norm),
        pytest.param("data=2 zero=3", losses_without_norm, marks=pytest.mark.slow),
    ],
)
def test_a_penalty_on_gradients_trains_as_on_one_device(warm_ranks: Warm, plan: str, run: Any) -> None:
    for found in warm_ranks(2).run(run, plan):
        assert found == pytest.approx(run("data=1"), rel=1e-9)


def test_what_can_be_differentiated_once_is_named() -> None:
    engine = echelon.parallelize(
        Penalised(SquareOnce()), "microbatches=2", optimizer=sgd, loss=mean_loss, audit="off"
    )
    with pytest.raises(UserError, match="an operation that can be differentiated once: ring attention"):
        engine.step((torch.randn(8, 6), torch.arange(8)))


def test_columns_of_a_divided_sequence_are_refused() -> None:
    region = Region(RecordingGroup("tensor", 0, 2, Ledger()), sequence=True)
    region.overlaps = True
    column = Column(nn.Linear(4, 4), region)
    for _ in range(2):  # the first call only learns what shares the input
        x = torch.randn(2, 6, 4, requires_grad=True) * 2
        y = column(x)
    with pytest.raises(UserError, match="use sequence=false"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
