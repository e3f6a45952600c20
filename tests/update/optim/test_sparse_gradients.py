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
from echelon.update.precision.stepper import check_gradient


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


SPARSE = torch.eye(3).to_sparse()


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 3))


def test_one_that_takes_no_sparse_gradient_is_refused_by_name() -> None:
    parameter = weight()
    with pytest.raises(
        UserError, match=r"optimizer Adam: table has a sparse gradient, which it does not take"
    ):
        check_gradient(torch.optim.Adam([parameter]), "table", parameter, SPARSE)
    with pytest.raises(UserError, match="optimizer SM3"):
        check_gradient(SM3([parameter], lr=0.1), "table", parameter, SPARSE)


def test_what_it_takes_changes_nothing() -> None:
    parameter = weight()
    parameter.grad = torch.full((3, 3), 7.0)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    groups, state = optimizer.param_groups, optimizer.state
    optimizer.step()
    before = {key: value.clone() for key, value in state[parameter].items()}
    values = parameter.detach().clone()
    check_gradient(optimizer, "table", parameter, SPARSE)
    check_gradient(torch.optim.Adam([parameter]), "dense", parameter, torch.eye(3))
    assert torch.equal(parameter, values)
    assert torch.equal(parameter.grad, torch.full((3, 3), 7.0))
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert list(state) == [parameter]
    assert all(torch.equal(state[parameter][key], value) for key, value in before.items())


def test_the_optimizer_is_as_before_where_it_refuses() -> None:
    parameter = weight()
    optimizer = torch.optim.Adam([parameter])
    groups, state = optimizer.param_groups, optimizer.state
    with pytest.raises(UserError):
        check_gradient(optimizer, "table", parameter, SPARSE)
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert not state


def test_a_fused_kernel_is_not_asked() -> None:
    """It takes no sparse gradient, where the same optimizer without it does."""
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    check_gradient(optimizer, "table", parameter, SPARSE)
    assert optimizer.param_groups[0]["fused"] is True


def test_of_several_optimizers_the_one_that_has_the_weight_is_asked() -> None:
    dense, table = weight(), weight()
    optimizer = CombinedOptimizer([torch.optim.Adam([dense]), torch.optim.SGD([table], lr=0.1)])
    check_gradient(optimizer, "table", table, SPARSE)
    with pytest.raises(UserError, match="optimizer Adam: dense"):
        check_gradient(optimizer, "dense", dense, SPARSE)
    check_gradient(optimizer, "of nobody", weight(), SPARSE)


def test_a_gradient_is_tried_in_the_type_of_what_is_updated() -> None:
    parameter = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    check_gradient(torch.optim.SGD([parameter], lr=0.1, momentum=0.9), "table", parameter, SPARSE)
