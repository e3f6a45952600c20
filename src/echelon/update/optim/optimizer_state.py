"""An optimizer's state of a tensor: its keys, the type, device and dims of each value, and how it is loaded.

The optimizer itself is asked: a copy of it updates a tensor of one element, of which the state is kept.

    AdamW          step ()      exp_avg (1,)      exp_avg_sq (1,)
    AdamW, fused   step () on the device, in float32      …
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.state.checkpoint.saved import SavedParameter
from echelon.update.optim.local import begin_like
from echelon.update.optim.needs import inner_optimizers, works_by_element
from echelon.update.optim.sum_optimizer import SumOptimizer

Forms = Mapping[str, Any]  # by key: a tensor, of at most one element, or a number


def state_forms(
    optimizer: torch.optim.Optimizer, tensor: nn.Parameter, *, fused: bool = False
) -> Forms | None:
    """The state that the optimizer makes of a tensor, as small as it can be; None if it is unknown. `fused`:
    its kernel is chosen for each update (offload=optimizer)."""
    owner = owner_of(optimizer, tensor)
    return None if owner is None else _forms(*owner, tensor, fused=fused)


def has_no_state(optimizer: torch.optim.Optimizer, tensor: nn.Parameter) -> bool:
    """Return whether the optimizer never updates a tensor: this rank has only padding of the parameter."""
    owner = owner_of(optimizer, tensor)
    return owner is not None and isinstance(owner[0], SumOptimizer) and owner[0].passes_over(tensor)


def owner_of(
    optimizer: torch.optim.Optimizer, tensor: nn.Parameter
) -> tuple[torch.optim.Optimizer, dict[str, Any]] | None:
    """The one of its optimizers that updates a tensor, and the group."""
    for each in inner_optimizers(optimizer):
        for group in each.param_groups:
            if any(parameter is tensor for parameter in group["params"]):
                return each, group
    return None


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


@torch.no_grad()
def load_state(
    optimizer: torch.optim.Optimizer,
    updated: nn.Parameter,
    strides: Sequence[int],
    saved: SavedParameter,
    whole_parts: Set[str] = frozenset(),
    *,
    fused: bool = False,
) -> None:
    """Replace the state of `updated`, of which memory has these strides. `whole_parts`: state that belongs to
    the whole parameter, whatever is here of it."""
    before = optimizer.state.pop(updated, {})
    if not saved.state_parts and not saved.numbers:
        return  # never updated
    if has_no_state(optimizer, updated):
        return  # no later update would change it here, as it does where elements are
    forms = state_forms(optimizer, updated, fused=fused) or {}
    state: dict[str, Any] = {}
    for part in saved.state_parts:
        form = forms.get(part)
        dtype, device = _kind(part, form, updated, saved)
        # A number of steps is none for each element, also where the parameter is one number.
        is_number = isinstance(form, Tensor) and form.dim() < updated.dim()
        if part not in whole_parts and saved.is_by_element(part) and not is_number:
            state[part] = _memory(before.get(part), updated.shape, strides, dtype, device)
            saved.fill(part, state[part])
        else:
            state[part] = saved.whole(part).to(device, dtype)
    optimizer.state[updated] = {
        key: _as_made(key, value, forms) for key, value in {**state, **saved.numbers}.items()
    }


def _memory(
    before: Any, shape: torch.Size, strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the tensor that holds this state already, where it has this form; else new memory."""
    form = (shape, tuple(strides), dtype, device)
    if isinstance(before, Tensor) and (before.shape, before.stride(), before.dtype, before.device) == form:
        return before
    return torch.empty_strided(shape, tuple(strides), dtype=dtype, device=device)


def _kind(part: str, form: Any, updated: Tensor, saved: SavedParameter) -> tuple[torch.dtype, torch.device]:
    dtype = saved.parts[part].dtype
    if isinstance(form, Tensor):
        return form.dtype, form.device
    if part == "step":
        return dtype, torch.device("cpu")
    return (updated.dtype if dtype.is_floating_point else dtype), updated.device


def _as_made(key: str, value: Any, forms: Forms) -> Any:
    """A number as a tensor, or a tensor as a number, where another version of an optimizer has saved it."""
    form = forms.get(key)
    if isinstance(form, Tensor) and not isinstance(value, Tensor):
        return torch.tensor(value, dtype=form.dtype, device=form.device)
    if isinstance(value, Tensor) and isinstance(form, bool | int | float):
        return value.item()
    return value
