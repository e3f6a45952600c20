"""All-reduce written out over send and recv: the ring, and the naive one that shows why there is a ring.

Ring, N = 3, each rank's buffer in 3 chunks. Reduce-scatter: at step s rank r passes chunk r−s to its right
neighbour and adds the chunk r−s−1 that comes from its left. All-gather then passes the finished chunks on.

    reduce-scatter      step 0   step 1        all-gather    step 2   step 3
    rank 0 sends chunk     0        2          whole chunk      1        0
    rank 1 sends chunk     1        0                           2        1
    rank 2 sends chunk     2        1                           0        2

Each rank sends 2(N−1) chunks: 2(N−1)/N of the buffer, for every N. The backends' own all_reduce is
faster. These are the definition, and tests check the ledger's rule for all_reduce against them.
"""

import torch
from torch import Tensor

from echelon.collectives.group import COMBINE, Group, Reduction


def ring_all_reduce(group: Group, tensor: Tensor, op: Reduction = "sum") -> None:
    """Reduce `tensor` over the group in place; it may have any length, also zero."""
    size, rank = group.size, group.rank
    chunks = tensor.view(-1).tensor_split(size)
    incoming = torch.empty_like(chunks[0])  # the first chunk is the longest
    for step in range(size - 1):
        chunk = chunks[(rank - step - 1) % size]
        received = incoming[: chunk.numel()]
        _pass_on(group, chunks[(rank - step) % size], received)
        COMBINE[op](chunk, received, out=chunk)
    if op == "mean":
        chunks[(rank + 1) % size].div_(size)
    for step in range(size - 1):
        _pass_on(group, chunks[(rank - step + 1) % size], chunks[(rank - step) % size])


def _pass_on(group: Group, outgoing: Tensor, incoming: Tensor) -> None:
    """Odd ranks receive first: where messages run one after the other (NCCL), all would wait forever."""
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    if group.rank % 2:
        handles = (group.recv(incoming, left, wait=False), group.send(outgoing, right, wait=False))
    else:
        handles = (group.send(outgoing, right, wait=False), group.recv(incoming, left, wait=False))
    for handle in handles:
        handle.wait()


def naive_all_reduce(group: Group, tensor: Tensor, op: Reduction = "sum", hub: int = 0) -> None:
    """Reduce `tensor` in place through one rank, which receives and sends size−1 whole buffers."""
    if group.rank != hub:
        group.send(tensor, hub)
        group.recv(tensor, hub)
        return
    others = [rank for rank in range(group.size) if rank != hub]
    incoming = torch.empty_like(tensor)
    for other in others:
        group.recv(incoming, other)
        COMBINE[op](tensor, incoming, out=tensor)
    if op == "mean":
        tensor.div_(group.size)
    for other in others:
        group.send(tensor, other)
