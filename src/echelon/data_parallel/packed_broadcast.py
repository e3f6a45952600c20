"""Broadcast many tensors in few messages."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from echelon.collectives import Group

BYTES_AT_ONCE = 32 * 2**20


@torch.no_grad()
def broadcast_packed(tensors: Sequence[Tensor], group: Group) -> None:
    """Rank 0's values into everyone's tensors, however they lie in memory."""
    for portion in _portions(tensors):
        flat = _flatten_dense_tensors([tensor.contiguous() for tensor in portion])
        group.broadcast(flat, source=0)
        torch._foreach_copy_(portion, list(_unflatten_dense_tensors(flat, portion)))


def _portions(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and device, about as many bytes at a time as make one message worth it."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in kinds.values():
        portion: list[Tensor] = []
        size = 0
        for tensor in alike:
            portion.append(tensor)
            size += tensor.nbytes
            if size >= BYTES_AT_ONCE:
                yield portion
                portion, size = [], 0
        if portion:
            yield portion
