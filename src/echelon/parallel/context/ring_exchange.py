"""Messages around a ring of ranks, in both directions at once.

Every rank passes what it has on to both neighbours, so that half of the blocks come from the left and half
from the right. C = 5, whose tensors each rank gets in each round:

              round 0   round 1   round 2
    rank 0       0       4 and 1   3 and 2
    rank 1       1       0 and 2   4 and 3
    …
With an even number of ranks the last round has one block only, from the left.

All messages of a round are one all-to-all in which most ranks have nothing for each other. Over NCCL they run
at the same time, and no rank waits for another's order: all begin the same operations.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.collectives import Group, Handle

RIGHT, LEFT = 1, -1
WAYS = (RIGHT, LEFT)


class Message(NamedTuple):
    """`tensor` goes to `target`, and one of the same shape comes from `source`."""

    tensor: Tensor
    target: int
    source: int


class Exchange(NamedTuple):
    """Messages that are under way."""

    outgoing: Tensor  # kept alive until it is sent
    incoming: Tensor
    places: tuple[int, ...]  # of the answer to each message, in `incoming`
    handle: Handle

    def wait(self) -> list[Tensor]:
        """What the source of each message has sent."""
        self.handle.wait()
        return [self.incoming[place] for place in self.places]


class RingBlock(NamedTuple):
    """A tensor of `source` that has travelled `way` (0: this rank's own)."""

    way: int
    source: int
    tensor: Tensor


def start_exchange(group: Group, messages: Sequence[Message]) -> Exchange:
    """Start to send and to receive. All ranks give messages of the same number and shape.

    Two messages between the same two ranks arrive in the order in which both ranks list them.
    """
    by_target = sorted(messages, key=lambda message: message.target)
    by_source = sorted(range(len(messages)), key=lambda number: messages[number].source)
    tensors = [message.tensor for message in by_target]
    outgoing = torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]
    incoming = torch.empty_like(outgoing)
    rows = ([sum(rank == each[side] for each in messages) for rank in range(group.size)] for side in (2, 1))
    with group.ledger.about("context"):
        handle = group.all_to_all(incoming, outgoing, *rows, wait=False)
    places = tuple(by_source.index(number) for number in range(len(messages)))
    return Exchange(outgoing, incoming, places, handle)


def reach(ranks: int, way: int) -> int:
    """How many ranks a tensor travels to in this direction."""
    return ranks // 2 if way == RIGHT else (ranks - 1) // 2


def rounds(group: Group, tensor: Tensor) -> Iterator[list[RingBlock]]:
    """The blocks of each round: first this rank's own, then those of both neighbours, …

    The next ones travel while some are used, so the caller must not change them, and must let go of them
    before it asks for the next: they take memory.
    """
    rank, size = group.rank, group.size
    blocks = [RingBlock(0, rank, tensor)]
    latest = dict.fromkeys(WAYS, tensor)
    for step in range(reach(size, RIGHT) + 1):
        ways = [way for way in WAYS if step < reach(size, way)]
        messages = [Message(latest[way], (rank + way) % size, (rank - way) % size) for way in ways]
        exchange = start_exchange(group, messages) if messages else None
        yield blocks
        if exchange is not None:
            latest = dict(zip(ways, exchange.wait(), strict=True))
            exchange = None  # frees what was sent before the next round takes memory
            blocks = [RingBlock(way, (rank - way * (step + 1)) % size, latest[way]) for way in ways]
