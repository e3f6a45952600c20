"""Structures of tensors as plain data: what a layer returns, described so that another rank can rebuild it.

Tuples, lists and dicts of tensors, None, numbers and text, nested as they like. The description is text, so
two are equal when their texts are, and it travels as bytes.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from echelon.errors import UserError

_ALIGNMENT = 16  # bytes: any type of number may begin there


@dataclass(frozen=True)
class Leaf:
    """One tensor of a structure, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_gradient: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Its bytes, rounded up so that the next one is aligned."""
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Spec:
    """The description of a structure."""

    text: str

    @classmethod
    def of(cls, value: Any) -> tuple["Spec", list[Tensor]]:
        """The description of `value`, and its tensors in order."""
        tensors: list[Tensor] = []
        tree = _encode(value, tensors)
        # A view of a weight requires a gradient even where none is recorded.
        wants = [tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors]
        forms = [(list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
        leaves = [[*form, wanting] for form, wanting in zip(forms, wants, strict=True)]
        return _interned(json.dumps([tree, leaves])), tensors

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(
            Leaf(tuple(shape), getattr(torch, dtype), wants) for shape, dtype, wants in self._parsed[1]
        )

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The structure again, with these tensors in it."""
        return _decode(self._parsed[0], tensors)

    @cached_property
    def _parsed(self) -> Any:
        return json.loads(self.text)


@lru_cache(maxsize=1024)
def _interned(text: str) -> Spec:
    """One object for each text, so that it is parsed once and not with every microbatch."""
    return Spec(text)


def _encode(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise UserError(
                f"pipeline: a layer returned a tensor of layout {value.layout}, which cannot be sent; "
                "make it dense with to_dense()"
            )
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if type(value) in (tuple, list, torch.Size):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_encode(item, tensors) for item in value]]
    if type(value) is dict and all(isinstance(key, str | int) for key in value):
        return ["dict", [[key, _encode(item, tensors)] for key, item in value.items()]]
    if value is None or isinstance(value, bool | int | float | str):
        return ["plain", value]
    raise UserError(
        f"pipeline: a layer returned a {type(value).__name__}, which cannot be sent to the next stage; "
        "return tensors, numbers, text and None, in tuples, lists and dicts"
    )


def _decode(tree: Any, tensors: Sequence[Tensor]) -> Any:
    kind, content = tree
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "list":
        return [_decode(item, tensors) for item in content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    return content
