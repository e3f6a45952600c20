"""The optimizer's state of a tensor that it updates, taken from a checkpoint.

Types and devices are those that the optimizer itself makes (update/optim/state_forms.py). Of an unknown
optimizer, they are as torch's load_state_dict has them: state is of the type of what is updated, and a
number of steps stays as it is.
"""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from echelon.state.checkpoint import SavedParameter
from echelon.update.optim.state_forms import Forms, has_no_state, state_forms


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
    """Replace the state of `updated`, of which memory has these strides.

    `whole_parts`: state that belongs to the whole parameter, whatever is here of it.
    """
    before = optimizer.state.pop(updated, {})
    if not saved.state_parts and not saved.numbers:
        return  # never updated
    if has_no_state(optimizer, updated):
        return  # no later update would change it here, as it does where elements are
    forms = state_forms(optimizer, updated, fused=fused) or {}
    state: dict[str, Any] = {}
    for part in saved.state_parts:
        dtype, device = _kind(part, forms, updated, saved)
        if part not in whole_parts and _is_by_element(part, forms, updated, saved):
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
    """What holds this state already, where it has this form; else new memory."""
    form = (shape, tuple(strides), dtype, device)
    if isinstance(before, Tensor) and (before.shape, before.stride(), before.dtype, before.device) == form:
        return before
    return torch.empty_strided(shape, tuple(strides), dtype=dtype, device=device)


def _is_by_element(part: str, forms: Forms, updated: Tensor, saved: SavedParameter) -> bool:
    """A number of steps is none for each element, also where the parameter is one number."""
    form = forms.get(part)
    is_number = isinstance(form, Tensor) and form.dim() < updated.dim()
    return saved.is_by_element(part) and not is_number


def _kind(
    part: str, forms: Forms, updated: Tensor, saved: SavedParameter
) -> tuple[torch.dtype, torch.device]:
    form, dtype = forms.get(part), saved.parts[part].dtype
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
