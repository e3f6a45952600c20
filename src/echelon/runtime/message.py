"""A message between stages, in one piece of memory:

    | code | loss total, count | a flag for each tensor | tensor 0 | tensor 1 | …

Bytes of the host are moved as bytes: between the large operations of a model every small one on tensors takes
as long as all that is moved.
"""

import ctypes
import struct
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.runtime.structure import Leaf

CODE_BYTES = 8
_NUMBERS = struct.Struct("=qdd")  # the code, and the two numbers behind it

Tally = tuple[float, float]  # loss total, count
NO_TALLY: Tally = (0.0, 0.0)


class Gradients(NamedTuple):
    """The gradient of each tensor that wants one, or None, and the microbatch's loss total and count."""

    tensors: list[Tensor | None]
    tally: Tally


class _Layout(NamedTuple):
    """A message's size in bytes, and which of them each tensor has."""

    size: int
    bytes_of: list[slice]


@lru_cache(maxsize=1024)
def _layout(leaves: tuple[Leaf, ...]) -> _Layout:
    """The tensors lie behind a flag for each, aligned."""
    end = -(-(_NUMBERS.size + len(leaves)) // 16) * 16
    bytes_of = []
    for leaf in leaves:
        bytes_of.append(slice(end, end + leaf.num_bytes))
        end += leaf.room
    return _Layout(end, bytes_of)


def size(leaves: Sequence[Leaf]) -> int:
    return _layout(tuple(leaves)).size


def write(
    memory: Tensor, leaves: Sequence[Leaf], tensors: Sequence[Tensor | None], tally: Tally = NO_TALLY
) -> None:
    _write_head(memory, _NUMBERS.pack(0, *tally) + bytes([tensor is not None for tensor in tensors]))
    for leaf, each, tensor in zip(leaves, _layout(tuple(leaves)).bytes_of, tensors, strict=True):
        if tensor is None:
            continue
        if memory.is_cpu and _is_plain(tensor, leaf):
            ctypes.memmove(memory.data_ptr() + each.start, tensor.data_ptr(), leaf.num_bytes)
        else:
            _place(leaf, memory, each).copy_(tensor.detach())


def announce(memory: Tensor, length: int) -> None:
    """Write a code that says: a description of this length comes instead."""
    _write_head(memory, length.to_bytes(CODE_BYTES, sys.byteorder))


def code(memory: Tensor) -> int:
    """0, or the length of the description that follows."""
    return int.from_bytes(read(memory, CODE_BYTES), sys.byteorder)


def tensors_of(memory: Tensor, leaves: Sequence[Leaf]) -> list[Tensor]:
    """Each tensor's place, in its shape and type."""
    bytes_of = _layout(tuple(leaves)).bytes_of
    return [_place(leaf, memory, each) for leaf, each in zip(leaves, bytes_of, strict=True)]


def gradients_of(memory: Tensor, leaves: Sequence[Leaf]) -> Gradients:
    head = read(memory, _NUMBERS.size + len(leaves))
    _, total, count = _NUMBERS.unpack_from(head)
    flags = head[_NUMBERS.size :]
    tensors = tensors_of(memory, leaves)
    return Gradients(
        [tensor if flag else None for tensor, flag in zip(tensors, flags, strict=True)], (total, count)
    )


def read(memory: Tensor, length: int) -> bytes:
    """The first bytes."""
    return ctypes.string_at(memory.data_ptr(), length) if memory.is_cpu else bytes(memory[:length].tolist())


def _write_head(memory: Tensor, head: bytes) -> None:
    if memory.is_cpu:
        ctypes.memmove(memory.data_ptr(), head, len(head))
    else:
        memory[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))


def _is_plain(tensor: Tensor, leaf: Leaf) -> bool:
    """Whether its values are its memory."""
    dense = tensor.is_cpu and tensor.layout == torch.strided and tensor.dtype == leaf.dtype
    return dense and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _place(leaf: Leaf, memory: Tensor, each: slice) -> Tensor:
    return memory[each].view(leaf.dtype).view(leaf.shape)
