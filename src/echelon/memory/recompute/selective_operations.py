"""The operations that `recompute=selective` computes again, and the cost of each.

    pass     the time to move as many bytes through memory as the operation returns
    cheap    a few passes: pointwise functions, norms, softmax, casts and copies
    product  more passes the longer its rows are: linear layers, only where they are added to something kept
    other    attention, convolutions, embeddings, random numbers, messages: kept

`python -m benchmarks selective-costs` measures the passes; a test compares its file with this classification.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from echelon.nn.dropout.mask import drop

# A saved tensor is computed again if that takes at most so many passes over it.
MOST_PASSES = 20.0

# Cheap beside all that torch tags as pointwise. Each returns new memory, and the same bits every time.
_CHEAP = (
    *("_fused_rms_norm", "_log_softmax", "_softmax", "native_group_norm", "native_layer_norm"),
    *("_to_copy", "cat", "clone", "stack", "mean", "sum"),
)
# They also write statistics, without which they return the same: arguments 3 and 4.
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm")

_BYTES_PER_FLOP = {"cpu": 1 / 10, "cuda": 1 / 12}
_BYTES_PER_FLOP_16_BIT = {"cpu": 1 / 10, "cuda": 1 / 150}


class Kind(Enum):
    CHEAP = "cheap"
    WRITES = "writes"  # changes its arguments
    OTHER = "other"


@cache
def kind_of(operation: Any) -> Kind:
    """Return the kind of an operator of torch, as a dispatch mode sees it."""
    if operation._schema.is_mutable:
        return Kind.WRITES
    is_view = any(result.alias_info is not None for result in operation._schema.returns)
    if is_view or operation.namespace != "aten" or torch.Tag.nondeterministic_seeded in operation.tags:
        return Kind.OTHER
    name = operation._schema.name.removeprefix("aten::")
    is_cheap = torch.Tag.pointwise in operation.tags or name in (*_CHEAP, *_BATCH_NORMS)
    return Kind.CHEAP if is_cheap else Kind.OTHER


def repeatable(operation: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with which an operation does nothing but return its result again."""
    if operation._schema.name.removeprefix("aten::") in _BATCH_NORMS and args[5]:
        return (*args[:3], None, None, *args[5:])
    return args


# Functions, as a function mode sees them: most models call few, and these need not be watched inside.


def _functions(names: str) -> set[Callable[..., Any]]:
    places = (Tensor, torch, F)
    return {getattr(place, name) for name in names.split() for place in places if hasattr(place, name)}


class Way(Enum):
    """The way in which a function is watched."""

    STRAIGHT = "straight"  # not at all: nothing in it is cheap, and it does not write
    PRODUCT = "product"
    NEW = "new"  # it returns new memory
    MAYBE_NEW = "maybe new"  # new memory, or that of its first argument


# What autograd saves of products and of simple functions are arguments, or is small.
_PRODUCTS = frozenset({F.linear, torch.addmm})
# A product runs again only for a sum, as of attention and the residual stream, and only if it is short.
_SUMS = frozenset({Tensor.add, torch.add})
_DROPOUTS = frozenset({drop})
_NEW = _functions("add sub mul div neg pow mean cos sin gelu layer_norm cat clone")
_MAYBE_NEW = _DROPOUTS | _functions("silu to float type contiguous reshape flatten")
# Products of other kinds, views, and questions: nothing in them is cheap, and none writes.
_QUESTIONS = ("shape", "dtype", "device", "ndim", "grad_fn", "requires_grad", "is_leaf", "layout", "is_cuda")
_STRAIGHT = frozenset(
    _functions(
        "view transpose permute unsqueeze squeeze expand expand_as chunk split unbind t movedim narrow "
        "select __getitem__ detach size dim stride numel is_floating_point is_contiguous storage_offset "
        "element_size untyped_storage data_ptr requires_grad_ register_hook matmul __matmul__ mm bmm "
        "baddbmm scaled_dot_product_attention embedding conv1d conv2d conv3d arange promote_types"
    )
    | {getattr(Tensor, name).__get__ for name in (*_QUESTIONS, "T", "mT")}
)
WAYS: dict[Any, Way] = {
    function: way
    for way, functions in (
        (Way.STRAIGHT, _STRAIGHT),
        (Way.PRODUCT, _PRODUCTS),
        (Way.NEW, _NEW),
        (Way.MAYBE_NEW, _MAYBE_NEW),
    )
    for function in functions
}


def is_autocast() -> bool:
    """Return whether functions cast their arguments; operations do so no more."""
    return torch._C._is_any_autocast_enabled()


@contextmanager
def without_autocast() -> Iterator[None]:
    """Around operations that were noted below autocast."""
    enabled = [device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)


def drops_nothing(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether it is a dropout that returns its argument, as in most large models."""
    return function is F.dropout and (kwargs.get("p") == 0 or kwargs.get("training") is False)


def passes_product(function: Callable[..., Any], *, in_sum: bool) -> bool:
    """Return whether a product may run again as an argument of `function`. `in_sum`: that is one of a sum."""
    return function in _SUMS or (in_sum and function in _DROPOUTS)


def writes(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function changes its first argument, or one that is named."""
    name = getattr(function, "__name__", "")
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return is_in_place or "out" in kwargs or bool(kwargs.get("inplace"))


def returns_new_memory(result: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the result of a simple function is a tensor, and no view of its first argument."""
    first = args[0]
    if not isinstance(result, Tensor) or result.layout is not torch.strided:
        return False
    if not isinstance(first, Tensor) or first.layout is not torch.strided:
        return True
    return bool(result.untyped_storage()._cdata != first.untyped_storage()._cdata)


def product_cost(function: Callable[..., Any], args: tuple[Any, ...], output: Tensor) -> float:
    """Return the time of a product, in bytes that memory moves meanwhile."""
    length: int = args[0 if function is F.linear else min(1, len(args) - 1)].shape[-1]
    return 2.0 * output.numel() * length * bytes_per_flop(output)


def bytes_per_flop(output: Tensor) -> float:
    """The bytes that memory moves while one floating-point operation of a product runs."""
    per_flop = _BYTES_PER_FLOP_16_BIT if output.element_size() == 2 else _BYTES_PER_FLOP
    return per_flop.get(output.device.type, 1.0)
