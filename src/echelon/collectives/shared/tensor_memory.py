"""The memory of tensors, without autograd, and the reduction of all ranks' parts in it."""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from echelon.collectives.group import COMBINE, Reduction

Fetch = Callable[[int, Tensor], Tensor]  # returns the part of a rank; it may use the given memory for it

copy_bytes = ctypes.memmove  # (destination, source, bytes); releases the interpreter's lock


class TensorMemory(NamedTuple):
    """The memory that a tensor has when this is made. This object, and each piece of it, keeps it alive."""

    address: int
    length: int  # in bytes
    dtype: torch.dtype
    storage: UntypedStorage

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMemory":
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                "a conjugate or negative view does not have its values in its memory; call .resolve_conj() "
                "or .resolve_neg() first"
            )
        return cls(tensor.data_ptr(), tensor.nbytes, tensor.dtype, tensor.untyped_storage())

    def pieces(self, length: int) -> "list[TensorMemory]":
        """Parts of `length` bytes; the last may be shorter."""
        if self.length <= length:
            return [self]
        return [
            self._replace(address=self.address + start, length=min(length, self.length - start))
            for start in range(0, self.length, length)
        ]

    def copy_to(self, address: int) -> None:
        copy_bytes(address, self.address, self.length)

    def copy_from(self, address: int) -> None:
        copy_bytes(self.address, address, self.length)


def flat_alias(tensor: Tensor) -> Tensor:
    """Return a flat tensor over the same memory, without the autograd and inference state of `tensor`.

    Like a backend we write into memory, not into a node of the graph: the version counter stays. The memory
    lives as long as the alias or a view of it, also after `tensor.data = …`.
    """
    memory = TensorMemory.of(tensor)
    buffer = (ctypes.c_char * memory.length).from_address(memory.address)
    buffer.storage = memory.storage  # type: ignore[attr-defined]  # keeps the memory alive
    with torch.inference_mode(False):
        return torch.frombuffer(buffer, dtype=memory.dtype)


def pieces(flat: Tensor, elements: int) -> Sequence[Tensor]:
    """Parts of `elements` elements; the last may be shorter."""
    return [flat] if flat.numel() <= elements else flat.split(elements)


def view_like(buffer: Tensor, like: Tensor, start: int = 0) -> Tensor:
    """`buffer` (bytes) in the type of `like`: as many elements as `like` has, from element `start` on."""
    return buffer.view(like.dtype)[start : start + like.numel()]


def reduce_in_rank_order(
    fetch: Fetch, size: int, output: Tensor, op: Reduction, scratch: tuple[Tensor, Tensor]
) -> None:
    """Reduce the parts of ranks 0 … size−1, in this order, into `output`.

    Only the last addition writes to `output`, which may be the memory of a part that is not yet added.
    """
    partial, incoming = (view_like(buffer, output) for buffer in scratch)
    total = fetch(0, partial)
    for rank in range(1, size):
        destination = output if rank == size - 1 else partial
        total = COMBINE[op](total, fetch(rank, incoming), out=destination)
    if op == "mean":
        output.div_(size)


_PR_SET_PTRACER = 0x59616D61  # from linux/prctl.h


class _IoVector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the interpreter's lock


def let_siblings_read() -> None:
    """Allow the other children of our parent, which are the ranks, to read this process.

    Yama (on Ubuntu, for example) forbids that by default.
    """
    if sys.platform == "linux" and os.getppid() > 1:  # under process 1 every process would be a sibling
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read_memory(process: int, address: int, destination: int, length: int) -> None:
    """Copy `length` bytes at `address` of `process` to `destination`, an address of this process."""
    num_copied = 0
    while num_copied < length:
        local = _IoVector(destination + num_copied, length - num_copied)
        remote = _IoVector(address + num_copied, length - num_copied)
        result = _libc.process_vm_readv(process, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if result <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        num_copied += result
