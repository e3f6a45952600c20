"""Broadcast many tensors in few messages, through a buffer whose size does not depend on the model."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from echelon.collectives import Group

BYTES_AT_ONCE = 32 * 2**20


@torch.no_grad()
def broadcast_packed(tensors: Sequence[Tensor], group: Group) -> None:
    """Rank 0's values into everyone's tensors, however they lie in memory."""
    for portion in _portions(tensors):
        _broadcast(portion, group)


def _broadcast(portion: list[Tensor], group: Group) -> None:
    """Through a buffer that is gone when this returns; a single contiguous tensor is its own buffer."""
    flat = _flatten_dense_tensors([tensor.contiguous() for tensor in portion])
    group.broadcast(flat, source=0)
    torch._foreach_copy_(portion, list(_unflatten_dense_tensors(flat, portion)))


def _portions(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and device, in portions of at most `BYTES_AT_ONCE`, or one element."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).extend(_pieces(tensor.detach()))
    for alike in kinds.values():
        portion: list[Tensor] = []
        size = 0
        for tensor in alike:
            if portion and size + tensor.nbytes > BYTES_AT_ONCE:
                yield portion
                portion, size = [], 0
            portion.append(tensor)
            size += tensor.nbytes
        if portion:
            yield portion


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Views of a tensor, none larger than `BYTES_AT_ONCE`; none of a tensor without elements."""
    if tensor.nbytes <= BYTES_AT_ONCE or tensor.numel() == 1:
        yield from [tensor] if tensor.numel() else []
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    for rows in tensor.split(max(1, BYTES_AT_ONCE // row_bytes)):
        yield from _pieces(rows[0] if len(rows) == 1 else rows)
