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

from echelon.memory.recompute.selective_operations import is_autocast, without_autocast
from echelon.nn.autograd.saved_tensors import KeptTensor, check_unchanged


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
    call: "Call"
    number: int

    def value(self) -> Tensor:
        value: Tensor = self.call.values()[self.number]
        return value


class Source:
    """An argument. It keeps nothing alive, until the tensor is kept for it."""

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
        assert self.made_by is not None, "an argument that is not kept"
        return self._view.take(self.made_by.value())


def _longest_lived(tensor: Tensor) -> Tensor:
    """A view may be gone at once, where what it shows is still there: `logits.flatten(0, 1).float()`."""
    base = tensor._base
    if base is None or base.nbytes != tensor.nbytes or type(base) is not Tensor or base.dtype != tensor.dtype:
        return tensor
    return base


class Weight:
    """A parameter: it is there in the backward pass, unchanged."""

    __slots__ = ("_parameter", "_version")

    def __init__(self, parameter: Tensor) -> None:
        self._parameter, self._version = parameter, parameter._version

    def take(self) -> Tensor:
        check_unchanged(self._parameter, self._version)
        return self._parameter


class Call:
    """An operation. Its outputs are computed once for all that wait for them, and then let go."""

    __slots__ = (
        *("_args", "_kwargs", "_values", "cost", "function"),
        *("is_product", "is_settled", "num_waiting", "runs_again", "sources"),
    )

    def __init__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, sources: list[Source], cost: float | None
    ) -> None:
        """`args` and `kwargs` have sources in place of tensors. `cost`: of a product."""
        self.function, self._args, self._kwargs, self.sources = function, args, kwargs, sources
        self.is_product = cost is not None
        # In bytes that memory moves meanwhile. The caller adds the bytes of the outputs.
        self.cost = sum([source.num_bytes for source in sources]) if cost is None else cost
        self.runs_again: bool | None = None  # of a product: whether it may; None: not yet asked
        self.is_settled = False  # whether all that it needs is kept
        self.num_waiting = 0  # saved tensors that were not asked for yet
        self._values: tuple[Any, ...] | None = None

    def values(self) -> tuple[Any, ...]:
        values = self._compute() if self._values is None else self._values
        self._values = values if self.num_waiting > 0 else None
        return values

    def _compute(self) -> tuple[Any, ...]:
        if not torch.is_grad_enabled() and not is_autocast():
            return self._run()
        with torch.no_grad(), without_autocast():
            return self._run()

    def _run(self) -> tuple[Any, ...]:
        args = [_value(leaf) for leaf in self._args]
        kwargs = {name: _value(leaf) for name, leaf in self._kwargs.items()}
        result = self.function(*args, **kwargs)
        return result if isinstance(result, tuple) else (result,)


def _value(tree: Any) -> Any:
    kind = type(tree)
    if kind is Source:
        return tree.value()
    if kind is Weight:
        return tree.take()
    return kind([_value(item) for item in tree]) if kind is tuple or kind is list else tree


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of the arguments of an operation: of lists, and of dicts of keywords."""
    if type(tree) is dict:
        tree = list(tree.values())
    if type(tree) is tuple or type(tree) is list:
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]
