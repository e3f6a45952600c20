"""Calls of a forward pass that can be repeated, and what stands for a tensor that is not kept.

Call      an operation with its arguments: `values()` computes its outputs again
Source    one argument of a call: a tensor that is held, or an output of another call
Output    one output of a call
View      the elements of a storage that a tensor shows
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.recompute.selective_operations import without_autocast
from echelon.saved_tensors import KeptTensor, check_unchanged


class View(NamedTuple):
    """The elements of a storage that a tensor shows."""

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        return cls(tensor.shape, tensor.stride(), tensor.storage_offset())  # type: ignore[arg-type]

    def take(self, tensor: Tensor) -> Tensor:
        return tensor if self == View.of(tensor) else tensor.as_strided(*self)


class Output(NamedTuple):
    """One output of a call."""

    call: "Call"
    number: int

    def value(self) -> Tensor:
        value: Tensor = self.call.values()[self.number]
        return value


class Source:
    """An argument. It keeps nothing alive, until somebody keeps the tensor for it."""

    __slots__ = ("_tensor", "_version", "_view", "kept", "made_by", "num_bytes")

    def __init__(self, tensor: Tensor, made_by: Output | None, kept: KeptTensor | None) -> None:
        self._tensor, self._version = weakref.ref(_longest_lived(tensor)), tensor._version
        self._view = View.of(tensor)
        self.num_bytes, self.made_by, self.kept = tensor.nbytes, made_by, kept

    @property
    def tensor(self) -> Tensor | None:
        """The memory of the argument as it was, if it still exists."""
        tensor = self._tensor()
        return tensor if tensor is not None and tensor._version == self._version else None

    def hold(self, kept: KeptTensor) -> None:
        """The memory is kept: how it was made does not matter any more."""
        self.kept, self.made_by = kept, None

    def hold_copy(self, kept: KeptTensor, copy: Tensor) -> None:
        """The same, in memory of its own."""
        self.hold(kept)
        self._view = View.of(copy)

    def value(self) -> Tensor:
        if self.kept is not None:
            return self._view.take(self.kept.take())
        assert self.made_by is not None, "an argument that nobody keeps"
        return self._view.take(self.made_by.value())


def _longest_lived(tensor: Tensor) -> Tensor:
    """A view may be gone at once, where what it shows is still there: `logits.flatten(0, 1).float()`."""
    base = tensor._base
    if base is None or base.nbytes != tensor.nbytes or type(base) is not Tensor or base.dtype != tensor.dtype:
        return tensor
    return base


class Weight:
    """An argument that is a parameter: it is there in the backward pass, unchanged."""

    __slots__ = ("_parameter", "_version")

    def __init__(self, parameter: Tensor) -> None:
        self._parameter, self._version = parameter, parameter._version

    def value(self) -> Tensor:
        check_unchanged(self._parameter, self._version)
        return self._parameter


class Call:
    """An operation. Its outputs are computed once for all that wait for them, and then let go."""

    def __init__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, product_cost: float | None
    ) -> None:
        """`args` and `kwargs` have sources in place of tensors."""
        self.function, self._args, self._kwargs = function, args, kwargs
        self.is_product = product_cost is not None
        self.sources = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Source)]
        # In bytes that memory moves meanwhile. Whoever makes this adds the bytes of the outputs.
        self.cost = product_cost or sum(source.num_bytes for source in self.sources)
        self.num_waiting = 0  # saved tensors that were not asked for yet
        self._values: tuple[Any, ...] | None = None

    def values(self) -> tuple[Any, ...]:
        values = self._compute() if self._values is None else self._values
        self._values = values if self.num_waiting > 0 else None
        return values

    def _compute(self) -> tuple[Any, ...]:
        with torch.no_grad(), without_autocast():
            args, kwargs = replace(self._args, _value), replace(self._kwargs, _value)
            result = self.function(*args, **kwargs)
        return result if isinstance(result, tuple) else (result,)


def _value(leaf: Any) -> Any:
    return leaf.value() if isinstance(leaf, Source | Weight) else leaf


def leaves(tree: Any) -> list[Any]:
    """What the arguments of an operation consist of: lists, and dicts of keywords."""
    found: list[Any] = []
    replace(tree, found.append)
    return found


def replace(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists and dicts, with every leaf changed."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([replace(item, change) for item in tree])
    if kind is dict:
        return {key: replace(item, change) for key, item in tree.items()}
    return change(tree)
