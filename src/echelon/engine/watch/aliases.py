"""Other memory of the model that is the memory of a weight: a plan that moves the weight leaves it behind,
and one that updates it in the backward pass changes what the rest of that pass still reads.

    self.b = nn.Parameter(self.a.weight.data)        another parameter
    self.register_buffer("shadow", self.a.weight.data)
    self.views = [self.a.weight.data.T]              a plain attribute, or a list, tuple or dict of them
    self.head = lambda x: x @ matrix                 what a function, an object or an array of it holds

The same Parameter object in several modules is a tied weight, which every plan keeps.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from echelon.engine.step.python_state import PythonState
from echelon.errors import raise_errors
from echelon.memory.storages import address_of, overlap
from echelon.nn.batch import tensors_of
from echelon.plan import Plan

_OWN = frozenset(vars(nn.Module()))  # attributes of every module


class _Place(NamedTuple):
    """A tensor of the model, where it is, and the module that has it."""

    name: str
    tensor: Tensor
    module: nn.Module


def check_aliases(model: nn.Module, plan: Plan, device: torch.device | None, dtype: torch.dtype) -> None:
    """Refuse memory that is also a trained weight's, where the plan gives the weight other memory. Without a
    device, values come later."""
    weights = [_Place(name, p, model) for name, p in model.named_parameters() if p.layout == torch.strided]
    by_storage: dict[int, list[_Place]] = {}
    for weight in weights:
        if weight.tensor.requires_grad:
            by_storage.setdefault(_memory_of(weight.tensor), []).append(weight)
    pairs: list[tuple[str, str]] = []
    for place in [*weights, *_other_tensors(model)]:
        for weight in by_storage.get(_memory_of(place.tensor), ()):
            if place.tensor is weight.tensor:
                is_left = place.name != weight.name and _is_left_behind(place, plan, model)
            else:
                is_moved = _moves(weight.tensor, plan, device, dtype)
                is_left = overlap(place.tensor, weight.tensor) and (is_moved or plan.update != "step")
            if is_left and not {(place.name, weight.name), (weight.name, place.name)} & {*pairs}:
                pairs.append((place.name, weight.name))
    raise_errors(
        f"the model with plan '{plan}'",
        [
            f"{place} is memory of the weight {weight}, which this plan {_what_happens(plan, place)}; let "
            "both modules have the same Parameter object, which ties them, use data alone (zero=0, "
            f"update=step), or give {place} memory of its own (clone)"
            for place, weight in pairs
        ],
    )


def _other_tensors(model: nn.Module) -> Iterator[_Place]:
    """Buffers, and tensors in attributes of modules, which torch does not know of."""
    places = [_Place(name, buffer, model) for name, buffer in model.named_buffers()]
    state = PythonState(())
    state.leave_out(model.modules())
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            is_list_of_torch = isinstance(module, nn.RNNBase) and key == "_flat_weights"
            if key in _OWN or is_list_of_torch:
                continue
            name = f"{path}.{key}".removeprefix(".")
            is_nested = isinstance(value, Tensor | list | tuple | dict)
            tensors = tensors_of(value) if is_nested else state.reach(value)
            places += [_Place(name, tensor, module) for tensor in tensors]
    return (place for place in places if place.tensor.layout == torch.strided)


def _memory_of(tensor: Tensor) -> int:
    """Return where its storage begins: that of an array is another object."""
    address = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    return address or address_of(tensor)


def _is_left_behind(place: _Place, plan: Plan, model: nn.Module) -> bool:
    """Return whether the module that owns a Parameter object, which is an attribute of another one too, gets
    another object, or is of another stage."""
    if plan.tensor > 1 or plan.expert > 1:
        return True
    is_inside = place.module is not model and any(p is place.tensor for p in place.module.parameters())
    return plan.stages > 1 and not is_inside


def _moves(weight: Tensor, plan: Plan, device: torch.device | None, dtype: torch.dtype) -> bool:
    """Return whether a weight gets other memory than it has, now or in a step."""
    is_converted = (
        device is None or weight.device != device or (weight.is_floating_point() and weight.dtype != dtype)
    )
    is_sharded = (plan.zero > 0 and plan.ranks > 1) or plan.tensor > 1 or plan.expert > 1 or plan.stages > 1
    is_copied = plan.precision not in ("fp32", "fp64") or bool(plan.offload) or plan.sync == "async"
    return is_converted or is_sharded or is_copied or not plan.flushes


def _what_happens(plan: Plan, place: str) -> str:
    if plan.update != "step":
        return f"updates in the backward pass (update={plan.update}), while {place} is still read"
    return f"moves: {place} would stay as it is now"
