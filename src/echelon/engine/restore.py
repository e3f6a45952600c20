"""A model that was split over ranks, put together again when its engine closes."""

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.ownership import StateNames
from echelon.plan import Plan

# The models of which this process holds parts, each with the plan that has split it.
_split: "WeakKeyDictionary[nn.Module, Plan]" = WeakKeyDictionary()


def is_split(model: nn.Module) -> bool:
    """Whether ranks hold different parts of the model."""
    return model in _split


def mark_split(model: nn.Module, plan: Plan) -> None:
    """Remember that ranks hold different parts of the model from here on, if the plan splits it."""
    if plan.zero == 3 or plan.tensor > 1 or plan.stages > 1:
        _split[model] = plan


def check_whole(model: nn.Module) -> None:
    """Refuse a model of which this rank has a part."""
    if is_split(model):
        raise UserError(
            f"the model is split over ranks by another engine (plan '{_split[model]}'), and this rank has a "
            "part of it; close that engine first with engine.close(), which puts the model together, or "
            "build the model again"
        )


@torch.no_grad()
def restore_weights(model: nn.Module, weights: Mapping[str, Tensor], names: StateNames) -> None:
    """Give every parameter and buffer of `weights` its place in the model, tied ones together.

    A parameter that is still there keeps its identity, whatever memory it had.
    """
    whole: dict[str, nn.Parameter] = {}
    for name, tensor in weights.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if name not in names.parameters:
            if isinstance(tensor, Tensor) and attribute in module._buffers:
                module._buffers[attribute] = tensor
            continue
        first = names.parameters[name]
        if first not in whole:
            whole[first] = _parameter(module._parameters.get(attribute), tensor, first in names.trained)
        module._parameters[attribute] = whole[first]
    del _split[model]


def _parameter(current: nn.Parameter | None, tensor: Tensor, is_trained: bool) -> nn.Parameter:
    if current is None or current.shape != tensor.shape:
        return nn.Parameter(tensor, requires_grad=is_trained)
    current.data = tensor
    return current
