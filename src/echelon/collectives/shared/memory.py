"""Plain memory of tensors, and how parts of all ranks are combined in it."""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from echelon.collectives.group import Reduction

_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}

Fetch = Callable[[int, Tensor], Tensor]  # the part of a rank; the memory given may be used for it


copy = ctypes.memmove  # (to, from, bytes): lets go of the interpreter's lock


class Span(NamedTuple):
    """Memory of a tensor, as it is when this is made; it lives as long as this or a part of it."""

    address: int
    length: int  # in bytes
    dtype: torch.dtype
    storage: UntypedStorage

    @classmethod
    def of(cls, tensor: Tensor) -> "Span":
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                "a conjugate or negative view does not have its values in its memory; call .resolve_conj() "
                "or .resolve_neg() first"
            )
        return cls(tensor.data_ptr(), tensor.nbytes, tensor.dtype, tensor.untyped_storage())

    def pieces(self, length: int) -> "list[Span]":
        """Parts of `length` bytes, of which the last may be shorter."""
        if self.length <= length:
            return [self]
        return [
            self._replace(address=self.address + start, length=min(length, self.length - start))
            for start in range(0, self.length, length)
        ]

    def copy_to(self, address: int) -> None:
        copy(address, self.address, self.length)

    def copy_from(self, address: int) -> None:
        copy(self.address, address, self.length)


def plain(tensor: Tensor) -> Tensor:
    """The same memory, flat, and free of what autograd and inference mode keep of a tensor.

    Like a backend we write into memory, not into a node of the graph: no version is counted. The memory
    lives as long as this or a view of it, whatever becomes of the tensor (`tensor.data = …`).
    """
    span = Span.of(tensor)
    memory = (ctypes.c_char * span.length).from_address(span.address)
    memory.kept = span.storage  # type: ignore[attr-defined]
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=span.dtype)


def pieces(flat: Tensor, elements: int) -> Sequence[Tensor]:
    """Parts of so many elements, of which the last may be shorter."""
    return [flat] if flat.numel() <= elements else flat.split(elements)


def fit(room: Tensor, like: Tensor, start: int = 0) -> Tensor:
    """As much of `room` (bytes), in the type of `like` and from its element `start` on, as `like` fills."""
    return room.view(like.dtype)[start : start + like.numel()]


def combine(fetch: Fetch, size: int, output: Tensor, op: Reduction, scratch: tuple[Tensor, Tensor]) -> None:
    """Reduce the parts of ranks 0 … size−1, in this order, into `output`.

    Until the last addition the sum stands aside: `output` may be the memory of a part yet to be added.
    """
    aside, incoming = (fit(room, output) for room in scratch)
    total = fetch(0, aside)
    for rank in range(1, size):
        place = output if rank == size - 1 else aside
        total = _COMBINE[op](total, fetch(rank, incoming), out=place)
    if op == "mean":
        output.div_(size)
