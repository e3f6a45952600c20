"""A model that was split over ranks, put together again when its engine closes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.parallel.data.parameter_set import is_claimed
from echelon.parallel.data.zero.weight_access import FreedParameter, mark_whole
from echelon.plan import Plan
from echelon.state.ownership import StateNames

NO_BUFFERS: Mapping[str, Tensor] = MappingProxyType({})


class _Parts(NamedTuple):
    """The plan that has split a model, and the buffers that this rank has dropped and no state dict has."""

    plan: Plan
    temporary_buffers: Mapping[str, Tensor]
    stays_split: bool


# The models of which this process holds parts.
_split: "WeakKeyDictionary[nn.Module, _Parts]" = WeakKeyDictionary()

# The models whose layers see a part of the sequence, until their engine is closed.
_in_context: "WeakKeyDictionary[nn.Module, Plan]" = WeakKeyDictionary()


def is_split(model: nn.Module) -> bool:
    """Return whether ranks hold different parts of the model."""
    return model in _split


def is_put_together(model: nn.Module) -> bool:
    """Return whether the model is whole again when its engine closes: one that began without memory is not,
    since it may be larger than any rank."""
    return is_split(model) and not _split[model].stays_split


def mark_split(model: nn.Module, plan: Plan, temporary_buffers: Mapping[str, Tensor]) -> None:
    """Remember that ranks hold different parts of the model from here on, if the plan splits it."""
    if plan.context > 1:
        _in_context[model] = plan
    if _splits(plan):
        is_empty = model in _split  # it has no values yet
        _split[model] = _Parts(plan, temporary_buffers, stays_split=is_empty)


def mark_empty(model: nn.Module, plan: Plan) -> None:
    """Remember that the model has no values any more, or not yet: a start that fails leaves it so."""
    _split[model] = _Parts(plan, NO_BUFFERS, stays_split=True)


def mark_filled(model: nn.Module, plan: Plan) -> None:
    """Remember that the model has values again; it is whole unless the plan splits it."""
    if not _splits(plan):
        del _split[model]


def _splits(plan: Plan) -> bool:
    return plan.frees_weights or plan.tensor > 1 or plan.stages > 1 or plan.expert > 1


def check_whole(model: nn.Module) -> None:
    """Refuse a model of which this rank has a part, or whose layers another engine has changed."""
    for other, parts in _split.items():
        name = _shared_name(model, other)
        if name is not None:
            raise UserError(
                f"{name}: the model is split over ranks by another engine (plan '{parts.plan}'), and this "
                "rank has a part of it, or none; close an open engine with engine.close(), which puts the "
                "model together; if that engine failed or was closed with restore=False, build the model "
                "again"
            )
    for other, plan in _in_context.items():
        name = _shared_name(model, other)
        if name is not None and is_claimed(other.parameters()):
            raise UserError(
                f"{name}: another engine (plan '{plan}') is open, and its layers see a part of the sequence; "
                "close it with engine.close() first"
            )


def _shared_name(model: nn.Module, other: nn.Module) -> str | None:
    """Return the first parameter that two models have in common, present on this rank or not."""
    inside = set(other.modules())
    for path, module in model.named_modules():
        if module in inside and module._parameters:
            return f"{path}.{next(iter(module._parameters))}".removeprefix(".")
    freed = {id(p) for p in other.parameters() if type(p) is FreedParameter}
    return next((name for name, p in model.named_parameters() if id(p) in freed), None)


@torch.no_grad()
def restore_weights(model: nn.Module, weights: Mapping[str, Tensor], names: StateNames) -> None:
    """Give every parameter and buffer of `weights` its place in the model, tied ones together. What is still
    there keeps its identity, whatever memory it had."""
    whole: dict[str, nn.Parameter] = {}
    for name, tensor in {**weights, **_split[model].temporary_buffers}.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if name not in names.parameters:
            if attribute in module._buffers and module._buffers[attribute] is None:
                module._buffers[attribute] = tensor
            continue
        first = names.parameters[name]
        if first not in whole:
            whole[first] = _parameter(module._parameters.get(attribute), tensor, first in names.trained)
            whole[first].__dict__.update(names.attributes.get(first, {}))
        module._parameters[attribute] = whole[first]
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # it has a list of its weights beside them
            module._init_flat_weights()
    del _split[model]


def _parameter(current: nn.Parameter | None, tensor: Tensor, is_trained: bool) -> nn.Parameter:
    if current is None or current.shape != tensor.shape:
        is_trained = is_trained if current is None else current.requires_grad  # as the user left it
        return nn.Parameter(tensor, requires_grad=is_trained)
    mark_whole(current)
    current.data = tensor
    return current
