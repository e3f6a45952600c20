"""Gradients that an optimizer cannot take: sparse ones, refused before the first step or before an update.

Replicas sum dense gradients. With a single one, gradients stay as a module made them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from echelon.collectives.agreement import check_on_every_rank
from echelon.errors import UserError, raise_errors
from echelon.parallel.data.sharing import SingleReplica
from echelon.parallel.stage import LocalStages
from echelon.plan import Plan
from echelon.update.optim.local import begin_like
from echelon.update.optim.needs import inner_optimizers
from echelon.update.optim.optimizer_state import owner_of
from echelon.update.optim.sum_optimizer import SumOptimizer


def check_sparse_gradients(
    optimizer: torch.optim.Optimizer,
    local: LocalStages,
    plan: Plan,
    *,
    needs_whole: bool,
    on_host: bool = False,
) -> None:
    """Refuse embeddings with sparse=True that `optimizer`, over the model's own parameters, cannot update.
    `needs_whole`: it gets parameters whole from the ranks that hold parts of them. `on_host`: it updates
    there, and gets dense gradients."""

    def check() -> None:
        errors = list(_errors(optimizer, local, needs_whole, on_host))
        raise_errors(f"the optimizer {type(optimizer).__name__} with plan '{plan}'", errors)

    if plan.stages > 1:  # an embedding is on one of them
        check_on_every_rank(check)
    else:
        check()


def _errors(
    optimizer: torch.optim.Optimizer, local: LocalStages, needs_whole: bool, on_host: bool
) -> Iterator[str]:
    refusing = [
        each
        for each in inner_optimizers(optimizer)
        if needs_whole or on_host or isinstance(each, SumOptimizer)
    ]
    refused = {p for each in refusing for group in each.param_groups for p in group["params"]}
    other = "drop offload=optimizer" if on_host else "give it to SparseAdam"
    for sharing in local.sharings:
        if not isinstance(sharing, SingleReplica):
            continue
        names: dict[Tensor, str] = {p: name for name, p in sharing.parameter_set.trained}
        modules = (inner for outer in local.modules for inner in outer.modules())
        tables = [module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
        for weight in [table.weight for table in tables if table.sparse]:
            if weight in names and weight in refused:
                yield (
                    f"{names[weight]} is of an embedding with sparse=True, and the update needs all "
                    f"elements of its gradient; set sparse=False, or {other}"
                )


def check_gradient(optimizer: torch.optim.Optimizer, name: str, updated: nn.Parameter, grad: Tensor) -> None:
    """Raise if the optimizer cannot take `grad` for `updated`, which is (of) the parameter `name`."""
    owner = owner_of(optimizer, updated)
    if owner is None:
        return
    inner, group = owner
    if isinstance(inner, SumOptimizer):
        inner.check(updated, grad)
    elif grad.is_sparse:  # all take dense ones
        try:
            _try_on_copy(inner, group, updated, grad)
        except RuntimeError as error:
            raise UserError(
                f"optimizer {type(inner).__name__}: {name} has a sparse gradient, which it does not take "
                f"({error}); set sparse=False in the embedding, or use torch.optim.SGD"
            ) from error


def _try_on_copy(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], updated: nn.Parameter, grad: Tensor
) -> None:
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
