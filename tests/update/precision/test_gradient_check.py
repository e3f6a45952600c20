"""Whether an optimizer takes a gradient is found out without an update."""

import pytest
import torch
from torch import nn

from echelon.errors import UserError
from echelon.update.optim import SM3, CombinedOptimizer
from echelon.update.precision.stepper import check_gradient

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
