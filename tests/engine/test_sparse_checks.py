"""Sparse gradients that an optimizer cannot take are refused before the first step, on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon import parallelize
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.optim import SM3, Adafactor, CombinedOptimizer


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 4, sparse=True), Mean(), nn.Linear(4, 4), nn.Linear(4, 3))


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return Adafactor(parameters)


def error_of(plan: str) -> str:
    try:
        parallelize(model(), plan, optimizer=adafactor, loss=nn.functional.cross_entropy)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [Adafactor, SM3])
def test_an_embedding_with_sparse_gradients_is_refused(kind: Any) -> None:
    with pytest.raises(UserError, match=r"0\.weight is of an embedding with sparse=True.*sparse=False"):
        parallelize(model(), "data=1", optimizer=kind, loss=nn.functional.cross_entropy)


def test_all_ranks_of_a_pipeline_refuse_it(warm_ranks: Callable[[int], Ranks]) -> None:
    first, second = warm_ranks(2).run(error_of, "pipeline=2 microbatches=2")
    assert "sparse=True" in first
    assert "sparse=True" in second


def test_another_optimizer_may_take_them() -> None:
    def make(parameters: Any) -> CombinedOptimizer:
        table, *others = parameters
        return CombinedOptimizer([torch.optim.SparseAdam([table]), Adafactor(others)])

    with parallelize(model(), "data=1", optimizer=make, loss=nn.functional.cross_entropy) as engine:
        engine.step((torch.tensor([[1, 2], [3, 3]]), torch.tensor([0, 2])))
