"""Slots in one piece of memory: each in the first gap that is large enough."""

from bisect import bisect_left, insort
from collections import deque
from typing import final

from echelon.collectives.buffer_layout import ALIGNMENT, round_up


@final
class Slots:
    """Which bytes of a memory are taken. It may be larger than any memory: `size` is what was needed.

    >>> slots = Slots()
    >>> slots.take(100), slots.take(256), slots.take(10)
    (0, 256, 512)
    >>> slots.free(256); slots.take(300), slots.take(200), slots.size
    (768, 256, 1280)
    """

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # begin, end
        self._freed: deque[int] = deque()  # by any thread
        self.size = 0

    def take(self, num_bytes: int) -> int:
        """Where a slot begins."""
        self._collect()
        begin, size = 0, round_up(max(num_bytes, 1), ALIGNMENT)
        for other_begin, other_end in self._taken:
            if begin + size <= other_begin:
                break
            begin = other_end
        insort(self._taken, (begin, begin + size))
        self.size = max(self.size, begin + size)
        return begin

    def free(self, begin: int) -> None:
        self._freed.append(begin)

    def _collect(self) -> None:
        while self._freed:
            del self._taken[bisect_left(self._taken, (self._freed.popleft(), 0))]
