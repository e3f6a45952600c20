"""The arguments of a layer, copied so that it can be called again and its inputs' gradients can be taken."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_DEPTH = 5  # how deep objects are looked into for tensors


class Arguments(NamedTuple):
    """Arguments to call a layer with once, and the leaves of autograd's graph in them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Tensor]


def copy_arguments(args: Any, kwargs: Any, convert: Callable[[Tensor], Tensor]) -> Arguments:
    """What needs a gradient becomes a leaf. Its place is taken by a copy, which the layer may overwrite."""
    values, spec = tree_flatten((args, kwargs))
    leaves: list[Tensor] = []

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _copy_object(value)
        new = convert(value.detach()).clone()
        if not value.requires_grad:
            return new
        leaves.append(new.requires_grad_())
        with torch.enable_grad():
            return new.clone()

    new_args, new_kwargs = tree_unflatten([copied(value) for value in values], spec)
    return Arguments(new_args, new_kwargs, leaves)


def _copy_object(value: Any) -> Any:
    """Caches hold tensors of other layers, which torch does not copy while they are in a graph."""
    memo = {id(tensor): tensor.detach().clone() for tensor in _tensors_in(value, _DEPTH)}
    return copy.deepcopy(value, memo)


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or isinstance(value, type | torch.nn.Module):
        return
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _tensors_in(each, depth - 1)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()), depth)
    elif hasattr(value, "__dict__"):
        yield from _tensors_in(list(vars(value).values()), depth - 1)
