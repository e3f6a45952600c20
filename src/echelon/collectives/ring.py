"""All-reduce written out over send and recv: the ring, and the naive one that shows why there is a ring.

Ring, N = 3, each rank's buffer in 3 chunks. Reduce-scatter: at step s rank r passes chunk r−s to its right
neighbour and adds the chunk r−s−1 that comes from its left; all-gather passes the finished chunks round.

    reduce-scatter      step 0   step 1        all-gather    step 2   step 3
    rank 0 sends chunk     0        2          whole chunk      1        0
    rank 1 sends chunk     1        0                           2        1
    rank 2 sends chunk     2        1                           0        2

Each rank sends 2(N−1) chunks: 2(N−1)/N of the buffer, whatever N is. The backends' own all_reduce is
faster; these are the definition, and what the ledger's rule for all_reduce is checked against.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from echelon.collectives.group import Group, Reduction

_COMBINE: dict[Reduction, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda mine, other: mine.add_(other),
    "mean": lambda mine, other: mine.add_(other),
    "min": lambda mine, other: torch.minimum(mine, other, out=mine),
    "max": lambda mine, other: torch.maximum(mine, other, out=mine),
}


def ring_all_reduce(group: Group, tensor: Tensor, op: Reduction = "sum") -> None:
    """Reduce `tensor` over the group in place; any length, also shorter than the group, also empty."""
    size, rank = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(size)
    incoming = torch.empty_like(chunks[0])  # the first chunk is the longest
    for step in range(size - 1):
        chunk = chunks[(rank - step - 1) % size]
        arrived = incoming[: chunk.numel()]
        _pass_on(group, chunks[(rank - step) % size], arrived)
        _COMBINE[op](chunk, arrived)
    if op == "mean":
        chunks[(rank + 1) % size].div_(size)
    for step in range(size - 1):
        _pass_on(group, chunks[(rank - step + 1) % size], chunks[(rank - step) % size])


def _pass_on(group: Group, to_the_right: Tensor, from_the_left: Tensor) -> None:
    receiving = group.recv(from_the_left, (group.rank - 1) % group.size, wait=False)
    sending = group.send(to_the_right, (group.rank + 1) % group.size, wait=False)
    receiving.wait()
    sending.wait()


def naive_all_reduce(group: Group, tensor: Tensor, op: Reduction = "sum", hub: int = 0) -> None:
    """Reduce `tensor` in place through one rank, which takes and sends size−1 whole buffers."""
    if group.rank != hub:
        group.send(tensor, hub)
        group.recv(tensor, hub)
        return
    others = [rank for rank in range(group.size) if rank != hub]
    incoming = torch.empty_like(tensor)
    for other in others:
        group.recv(incoming, other)
        _COMBINE[op](tensor, incoming)
    if op == "mean":
        tensor.div_(group.size)
    for other in others:
        group.send(tensor, other)
