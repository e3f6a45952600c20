"""Gradients of keys and values on their way to the owner of their block.

They travel one hop behind their block, in its direction, and each rank on the way adds its part. The last
rank that the block reaches sends them straight to the owner. A block of rank 0 of 5:

    keys, values   0 ──> 1 ──> 2          0 ──> 4 ──> 3
    gradients            1 ──> 2 ──> 0          4 ──> 3 ──> 0

The owner adds both to its own part.
"""

from typing import final

from torch import Tensor

from echelon.collectives import Group
from echelon.parallel.context.ring_exchange import Exchange, Message, reach, start_exchange


@final
class ReturningGradients:
    """This rank's end of the gradients of all blocks, round by round."""

    def __init__(self, group: Group, own: Tensor) -> None:
        """`own`: this rank's part for its own block, to which the others' are added."""
        self._group, self._own = group, own
        self._step = 0  # the last round
        self._ways: list[int] = []
        self._exchange: Exchange | None = None
        self._travelling: dict[int, Tensor] = {}  # for the blocks of the next round

    def add(self, parts: dict[int, Tensor]) -> None:
        """This rank's parts for the blocks of the next round, by the direction that a block travels."""
        self._receive()
        self._step += 1
        for way, part in parts.items():
            if way in self._travelling:
                part += self._travelling.pop(way)
        self._ways = list(parts)
        self._exchange = start_exchange(self._group, [self._message(way, parts[way]) for way in parts])

    def finish(self) -> Tensor:
        """The complete gradients of this rank's own block, after the last round."""
        self._receive()
        return self._own

    def _message(self, way: int, part: Tensor) -> Message:
        hop = -way * self._step if self._is_last(way) else way
        rank, size = self._group.rank, self._group.size
        return Message(part, (rank + hop) % size, (rank - hop) % size)

    def _receive(self) -> None:
        if self._exchange is None:
            return
        received, self._exchange = self._exchange.wait(), None  # what was sent is no longer needed
        for way, gradients in zip(self._ways, received, strict=True):
            if self._is_last(way):
                self._own += gradients
            else:
                self._travelling[way] = gradients

    def _is_last(self, way: int) -> bool:
        return self._step == reach(self._group.size, way)
