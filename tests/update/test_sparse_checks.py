"""Sparse gradients that an optimizer cannot take are refused before the first step, on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon import parallelize
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.update.optim import SM3, Adafactor, CombinedOptimizer


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


def batch() -> tuple[Tensor, Tensor]:
    return torch.tensor([[0, 1], [1, 3], [1, 0]]), torch.tensor([0, 2, 1])


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_sparse_state_of_an_optimizer_is_read_whole() -> None:
    """The momentum of a sparse gradient is sparse: reshape is not implemented for sparse tensors."""
    torch.manual_seed(0)
    reference = model()
    optimizer = momentum(reference.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(batch()[0]), batch()[1]).backward()
        optimizer.step()
    torch.manual_seed(0)
    with parallelize(model(), "data=1", optimizer=momentum, loss=nn.functional.cross_entropy) as engine:
        for _ in range(2):
            engine.step(batch())
        torch.testing.assert_close(engine.full_state_dict(), dict(reference.state_dict()))
        (state,) = (s for name, s in engine.full_optimizer_state().items() if name == "0.weight")
    expected = optimizer.state[reference.get_parameter("0.weight")]["momentum_buffer"]
    torch.testing.assert_close(state["momentum_buffer"], expected.to_dense())


def test_an_optimizer_without_sparse_gradients_is_named_with_others() -> None:
    with (
        parallelize(
            model(), "data=1", optimizer=torch.optim.Adam, loss=nn.functional.cross_entropy
        ) as engine,
        pytest.raises(
            UserError, match=r"Adam does not support sparse gradients.*: set sparse=False.*SparseAdam"
        ),
    ):
        engine.step(batch())
