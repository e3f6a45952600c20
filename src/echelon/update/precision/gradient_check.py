"""Whether an optimizer takes a gradient, found out without an update.

Where units are updated one after the other, an optimizer that refuses a gradient would leave others updated.
"""

from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.update.optim.first_state import begin_like
from echelon.update.optim.sum_optimizer import SumOptimizer


def check_gradient(optimizer: torch.optim.Optimizer, name: str, updated: nn.Parameter, grad: Tensor) -> None:
    """Raise if the optimizer cannot take `grad` for `updated`, which is (of) the parameter `name`."""
    inside: list[torch.optim.Optimizer] = getattr(optimizer, "optimizers", [optimizer])
    for each in inside:
        for group in each.param_groups:
            if any(parameter is updated for parameter in group["params"]):
                _check(each, group, name, updated, grad)


def _check(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], name: str, updated: nn.Parameter, grad: Tensor
) -> None:
    if isinstance(optimizer, SumOptimizer):
        optimizer.check(updated, grad)
    elif grad.is_sparse:  # all take dense ones
        try:
            _try_on_copy(optimizer, group, updated, grad)
        except RuntimeError as error:
            raise UserError(
                f"optimizer {type(optimizer).__name__}: {name} has a sparse gradient, which it does not take "
                f"({error}); set sparse=False in the embedding, or use torch.optim.SGD"
            ) from error


def _try_on_copy(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], updated: nn.Parameter, grad: Tensor
) -> None:
    """Let the optimizer update a copy, and forget it."""
    copy = nn.Parameter(updated.detach().clone())
    copy.grad = grad.to(copy.dtype, copy=True)
    groups, state = optimizer.param_groups, optimizer.state
    # What a fused kernel does not take is not left to it.
    optimizer.param_groups = [group | {"params": [copy]} | ({"fused": None} if "fused" in group else {})]
    optimizer.state = begin_like(state, copy, updated)
    try:
        optimizer.step()
    finally:
        optimizer.param_groups, optimizer.state = groups, state
