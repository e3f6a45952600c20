"""What an optimizer's state of a tensor looks like: its keys, and the type, device and dims of each value.

The optimizer itself is asked: a copy of it updates a tensor of one element, of which the state is kept.

    AdamW          step ()      exp_avg (1,)      exp_avg_sq (1,)
    AdamW, fused   step () on the device, in float32      …
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from echelon.update.optim.first_state import begin_like
from echelon.update.optim.needs import works_by_element
from echelon.update.optim.sum_optimizer import SumOptimizer

Forms = Mapping[str, Any]  # by key: a tensor, of at most one element, or a number


def state_forms(
    optimizer: torch.optim.Optimizer, tensor: nn.Parameter, *, fused: bool = False
) -> Forms | None:
    """The state that the optimizer makes of a tensor, as small as it can be; None if nobody knows.

    `fused`: its kernel is chosen for each update (offload=optimizer).
    """
    owner = _owner(optimizer, tensor)
    return None if owner is None else _forms(*owner, tensor, fused=fused)


def has_no_state(optimizer: torch.optim.Optimizer, tensor: nn.Parameter) -> bool:
    """Whether the optimizer never updates a tensor, since this rank has padding alone of the parameter."""
    owner = _owner(optimizer, tensor)
    return owner is not None and isinstance(owner[0], SumOptimizer) and owner[0].passes_over(tensor)


def _owner(
    optimizer: torch.optim.Optimizer, tensor: nn.Parameter
) -> tuple[torch.optim.Optimizer, dict[str, Any]] | None:
    """The one of its optimizers that updates a tensor, and the group."""
    for each in inner_optimizers(optimizer):
        for group in each.param_groups:
            if any(parameter is tensor for parameter in group["params"]):
                return each, group
    return None


def inner_optimizers(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Those of a CombinedOptimizer, or the optimizer."""
    inside: Sequence[torch.optim.Optimizer] = getattr(optimizer, "optimizers", (optimizer,))
    return inside


def _forms(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], tensor: nn.Parameter, *, fused: bool
) -> Forms | None:
    if isinstance(optimizer, SumOptimizer):
        return optimizer.state_forms(group, tensor)
    is_known = works_by_element(optimizer) or type(optimizer) in (torch.optim.Adafactor, torch.optim.Muon)
    return _after_one_step(optimizer, group, tensor, fused=fused) if is_known else None


@torch.no_grad()
def _after_one_step(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], tensor: nn.Parameter, *, fused: bool
) -> Forms:
    small = nn.Parameter(torch.zeros((1,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device))
    small.grad = torch.zeros_like(small)
    copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy).pop("step", None)  # that of a learning-rate scheduler, which calls the original
    copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    copy.state = begin_like(optimizer.state, small, tensor)
    copy.param_groups = [{**group, "params": [small], **({"fused": True} if fused else {})}]
    step: Any = type(optimizer).step
    # Without torch's own wrapper, which tells the hooks of all optimizers.
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(copy)
    return {key: value for key, value in copy.state[small].items() if value is not None}
