"""Sparse gradients that no optimizer takes, refused by the embeddings that make them, before the first step.

Replicas sum dense gradients. With a single one, gradients stay as a module made them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from echelon.collectives.agreement import check_on_every_rank
from echelon.errors import raise_errors
from echelon.parallel.data import SingleReplica
from echelon.parallel.stage import LocalStages
from echelon.plan import Plan
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
    inside: Sequence[torch.optim.Optimizer] = getattr(optimizer, "optimizers", (optimizer,))
    refusing = [each for each in inside if needs_whole or on_host or isinstance(each, SumOptimizer)]
    refused = {p for each in refusing for group in each.param_groups for p in group["params"]}
    other = "drop offload=optimizer" if on_host else "give it to SparseAdam"
    for sharing in local.sharings:
        if not isinstance(sharing, SingleReplica):
            continue
        names: dict[Tensor, str] = {p: name for name, p in sharing.parameter_set.trained}
        for weight in _sparse_weights(local):
            if weight in names and weight in refused:
                yield (
                    f"{names[weight]} is of an embedding with sparse=True, and the update needs all "
                    f"elements of its gradient; set sparse=False, or {other}"
                )


def _sparse_weights(local: LocalStages) -> list[Tensor]:
    modules = (inner for outer in local.modules for inner in outer.modules())
    tables = (module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return [table.weight for table in tables if table.sparse]
