"""Plain memory of tensors, and how parts of all ranks are combined in it."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon.collectives.group import Reduction

_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}

Fetch = Callable[[int, Tensor], Tensor]  # the part of a rank; the memory given may be used for it


def plain(tensor: Tensor) -> Tensor:
    """The same memory, flat, and free of what autograd and inference mode keep of a tensor.

    Like a backend we write into memory, not into a node of the graph: no version is counted. The memory
    lives as long as this or a view of it, whatever becomes of the tensor (`tensor.data = …`).
    """
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "a conjugate or negative view does not have its values in its memory; call .resolve_conj() or "
            ".resolve_neg() first"
        )
    memory = (ctypes.c_char * bytes_of(tensor)).from_address(tensor.data_ptr())
    memory.kept = tensor.untyped_storage()  # type: ignore[attr-defined]
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=tensor.dtype)


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def fit(room: Tensor, like: Tensor, start: int = 0) -> Tensor:
    """As much of `room` (bytes), in the type of `like` and from its element `start` on, as `like` fills."""
    typed = room if like.dtype == room.dtype else room.view(like.dtype)
    return typed[start : start + like.numel()]


def pieces_of(flat: Tensor, size: int) -> Sequence[Tensor]:
    """The bytes of flat memory, in pieces of at most `size`."""
    memory = flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)
    return [memory] if len(memory) <= size else memory.split(size)


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
