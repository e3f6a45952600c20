"""Memory of the host for gradients on their way to an update: pieces of one memory, in turn.

    | in use: units 7, 6, 5 | free …                 | in use: units 9, 8 |
                            ↑ the next piece          ↑ the first to be given back

Updates run in the order in which their gradients came, so pieces come back in the order in which they were
taken. Who finds no room waits until there is.
"""

import threading
from collections import deque
from typing import final

import torch
from torch import Tensor

from echelon.collectives import HostBoundary


@final
class HostRing:
    """One thread takes pieces, another gives them back."""

    def __init__(self, boundary: HostBoundary, num_bytes: int) -> None:
        self._memory = boundary.empty(num_bytes, torch.uint8)
        self._taken: deque[tuple[int, int]] = deque()  # (begin, end) of each piece, the oldest first
        self._changed = threading.Condition()
        self._is_abandoned = False

    def take(self, num_bytes: int) -> Tensor:
        """A piece of memory; waits until there is room for it."""
        assert num_bytes <= len(self._memory), (num_bytes, len(self._memory))
        with self._changed:
            while (begin := self._find(num_bytes)) is None and not self._is_abandoned:
                self._changed.wait()
            begin = begin or 0
            self._taken.append((begin, begin + num_bytes))
        return self._memory[begin : begin + num_bytes]

    def give_back(self) -> None:
        """The oldest piece is free."""
        with self._changed:
            self._taken.popleft()
            self._changed.notify()

    def abandon(self) -> None:
        """Nobody gives back or reads a piece any more: nobody need wait for one."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify()

    def storages(self) -> list[Tensor]:
        return [self._memory]

    def _find(self, size: int) -> int | None:
        if not self._taken:
            return 0
        oldest, newest = self._taken[0][0], self._taken[-1][1]
        if newest > oldest:  # what is in use is in one piece: behind it, or before it
            if newest + size <= len(self._memory):
                return newest
            return 0 if size < oldest else None
        return newest if newest + size < oldest else None
