"""Host memory for what layers save: pieces that are taken and given back, and never freed before the end.

A piece has one of eight sizes for each power of two, so that batches of other shapes use it again. What is
held is at most what was in use at once, of each size.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from echelon.collectives.boundary import HostBoundary, HostMemoryError
from echelon.quantities import show_bytes

_SIZES = 8  # of pieces, for each power of two
_PAGE = 4096  # bytes: the smallest piece, and what sizes are multiples of
_MOST_LARGER = 1.5  # how many times larger a piece may be than what is asked for


@final
class HostPool:
    """Pieces of host memory. `free_bytes`: what the host has left, asked for each new piece; None if it
    is unknown."""

    def __init__(self, boundary: HostBoundary, free_bytes: Callable[[], int | None]) -> None:
        self._boundary, self._free_bytes = boundary, free_bytes
        self._idle: defaultdict[int, list[Tensor]] = defaultdict(list)  # by their size
        self.pieces: list[Tensor] = []
        self.refusal: str | None = None  # why there was no memory, the first time

    @property
    def num_bytes(self) -> int:
        """All that is held, in use or idle."""
        return sum(map(len, self.pieces))

    def take(self, num_bytes: int) -> Tensor | None:
        """A piece of at least so many bytes; None if the host has no memory left."""
        size = piece_size(num_bytes)
        for known in sorted(self._idle):
            if size <= known <= _MOST_LARGER * size and self._idle[known]:
                return self._idle[known].pop()
        free = self._free_bytes()
        if free is not None and size > free:
            self.refusal = self.refusal or (
                f"{show_bytes(size)} more are needed beside the {show_bytes(self.num_bytes)} that this rank "
                f"holds, and the host has {show_bytes(max(0, free))} left"
            )
            return None
        try:
            piece = self._boundary.empty(size, torch.uint8)
        except HostMemoryError as error:
            self.refusal = self.refusal or str(error)
            return None
        self.pieces.append(piece)
        return piece

    def give_back(self, piece: Tensor) -> None:
        self._idle[len(piece)].append(piece)


def piece_size(num_bytes: int) -> int:
    """The size of the piece for so many bytes.

    >>> piece_size(1), piece_size(5000), piece_size(1_000_000)
    (4096, 8192, 1048576)
    """
    step = max(_PAGE, (1 << (max(num_bytes, 1) - 1).bit_length()) // (2 * _SIZES))
    return -(-max(num_bytes, 1) // step) * step
