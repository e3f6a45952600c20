"""A message between stages: tensors in one piece of memory, and a head of plain bytes.

    head      | code | a flag for each tensor |
    memory    | tensor 0 | tensor 1 | …

The code says whether the message has the form that its receiver expects, the flags which tensors are there.
In host memory the head lies in front of the tensors. Before tensors of another device it travels by itself,
from host to host: to read it out of device memory, the host would have to wait for the device.

Bytes of the host are moved as bytes: between the large operations of a model every small one on tensors takes
as long as all that is moved.
"""

import ctypes
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.errors import UserError

# Structures of tensors as plain data: what a layer returns, described so that another rank can rebuild it.

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
        if type(value) is Tensor and value.layout == torch.strided:  # as most layers return
            wants = value.requires_grad and torch.is_grad_enabled()
            return _of_tensor(value.shape, value.dtype, wants), [value]
        tensors: list[Tensor] = []
        tree = _encode(value, tensors)
        # A view of a weight requires a gradient even where none is recorded.
        is_enabled = torch.is_grad_enabled()
        leaves = [_leaf_text(each.shape, each.dtype, each.requires_grad and is_enabled) for each in tensors]
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


@lru_cache(maxsize=1024)
def _of_tensor(shape: torch.Size, dtype: torch.dtype, wants_gradient: bool) -> Spec:
    """The description of one tensor, which is not written again with every microbatch."""
    return _interned(json.dumps([["tensor", 0], [_leaf_text(shape, dtype, wants_gradient)]]))


def _leaf_text(shape: torch.Size, dtype: torch.dtype, wants_gradient: bool) -> list[Any]:
    return [list(shape), str(dtype).removeprefix("torch."), wants_gradient]


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


CODE_BYTES = 8


class Gradients(NamedTuple):
    """The gradient of each tensor that wants one, or None; and the microbatch's (loss total, count), where
    updates have losses of their own."""

    tensors: list[Tensor | None]
    tally: Tensor | None = None


TALLY = Leaf((3,), torch.float64, wants_gradient=False)


class Layout(NamedTuple):
    """The places of a message's tensors in its memory, behind the head where that is `head_inside`."""

    leaves: tuple[Leaf, ...]
    head_inside: bool
    size: int
    places: list[slice]  # in bytes

    def write(self, memory: Tensor, tensors: Sequence[Tensor | None]) -> None:
        for leaf, place, tensor in zip(self.leaves, self.places, tensors, strict=True):
            if tensor is None:
                continue
            if memory.is_cpu and _is_plain(tensor, leaf):
                ctypes.memmove(memory.data_ptr() + place.start, tensor.data_ptr(), leaf.num_bytes)
            else:
                _view(leaf, memory, place).copy_(tensor.detach())

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """Each tensor's place, in its shape and type."""
        return [_view(leaf, memory, place) for leaf, place in zip(self.leaves, self.places, strict=True)]

    @property
    def head_size(self) -> int:
        return CODE_BYTES + len(self.leaves)


@lru_cache(maxsize=1024)
def layout(leaves: tuple[Leaf, ...], *, head_inside: bool) -> Layout:
    """The tensors one behind the other, aligned."""
    end = -(-(CODE_BYTES + len(leaves)) // 16) * 16 if head_inside else 0
    places = []
    for leaf in leaves:
        places.append(slice(end, end + leaf.num_bytes))
        end += leaf.room
    return Layout(leaves, head_inside, end, places)


# Heads.


def pack_code(code: int) -> bytes:
    return code.to_bytes(CODE_BYTES, sys.byteorder)


def pack_flags(tensors: Sequence[Tensor | None]) -> bytes:
    return bytes(tensor is not None for tensor in tensors)


def code_of(head: bytes) -> int:
    """0, or the length of the description that follows."""
    return int.from_bytes(head[:CODE_BYTES], sys.byteorder)


def flags_of(head: bytes) -> bytes:
    return head[CODE_BYTES:]


# Bytes in host memory.


def host_bytes(data: bytes) -> Tensor:
    """A tensor that holds `data`."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def write_bytes(memory: Tensor, data: bytes) -> None:
    """Put `data` at the beginning of host memory."""
    ctypes.memmove(memory.data_ptr(), data, len(data))


def read_bytes(memory: Tensor, length: int) -> bytes:
    """The first bytes of host memory."""
    return ctypes.string_at(memory.data_ptr(), length)


def _is_plain(tensor: Tensor, leaf: Leaf) -> bool:
    """Return whether its memory holds its values in order, so that it can be copied as bytes."""
    dense = tensor.is_cpu and tensor.layout == torch.strided and tensor.dtype == leaf.dtype
    return dense and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _view(leaf: Leaf, memory: Tensor, place: slice) -> Tensor:
    return memory[place].view(leaf.dtype).view(leaf.shape)
