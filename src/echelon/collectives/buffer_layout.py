"""Lay out tensors in one buffer: each at a multiple of 256 bytes, as kernels and NCCL want them.

    places   | query |gap| key |gap| value |      a gap is what is missing to the next block of 256 bytes

Gaps are part of no tensor. Weights and their gradients may be of different types and have one layout, so
places are counted in elements.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")

ALIGNMENT = 256  # bytes


class BufferLayout(NamedTuple):
    """The begin and end of each tensor in a buffer of `size` elements."""

    places: Sequence[tuple[int, int]]
    size: int

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the gaps between the tensors, and behind the last."""
        end = 0
        for begin, following in (*self.places, (self.size, self.size)):
            if end < begin:
                yield end, begin
            end = following


def block_size(*dtypes: torch.dtype) -> int:
    """Return the elements of a block, which is a multiple of 256 bytes in each of these types."""
    return -(-ALIGNMENT // min(dtype.itemsize for dtype in dtypes))


def lay_out(counts: Iterable[int], block: int) -> BufferLayout:
    """Tensors of `counts` elements one after the other, each at the start of a block; whole blocks in all.

    >>> lay_out([100, 64, 3], block=64)
    BufferLayout(places=[(0, 100), (128, 192), (192, 195)], size=256)
    """
    places = []
    end = 0
    for count in counts:
        begin = round_up(end, block)
        end = begin + count
        places.append((begin, end))
    return BufferLayout(places, round_up(end, block))


def round_up(count: int, block: int) -> int:
    return -(-count // block) * block


def portions(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Divide items into portions of at most `limit` bytes, or of one item that is larger."""
    portion: list[T] = []
    taken = 0
    for item in items:
        size = size_of(item)
        if taken and size and taken + size > limit:
            yield portion
            portion, taken = [], 0
        portion.append(item)
        taken += size
    if portion:
        yield portion
