"""Whether boxes hold each element of a tensor exactly once, in time that grows with their number alone.

The corners of a box, + where an even number of coordinates are ends, - where an odd number are, say what it
covers. Those of boxes side by side cancel, and what remains are the corners of the whole:

    +---+---+      + 0 -        The corners of 0…2 and 2…4, added up:  + at 0, - at 2, + at 2, - at 4
    |   |   |                   are those of 0…4. With a gap, or with two boxes on one place, they are not.
    +---+---+      - 0 +
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import final

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # offsets and sizes

MOST_CORNERS = 2**20  # of one tensor: they are in memory together
_FREE_CORNERS = 2**18  # of all tensors, beside those of each box
_CORNERS_PER_BOX = 32  # boxes are cut along 5 dims at most, but for a few


@final
class CornerBudget:
    """How many corners are looked at for all tensors of a manifest: few boxes of many dims have many."""

    def __init__(self, num_boxes: int) -> None:
        self._left = _FREE_CORNERS + _CORNERS_PER_BOX * num_boxes

    def take(self, count: int) -> bool:
        """Whether so many more may be looked at."""
        is_enough = count <= min(self._left, MOST_CORNERS)
        self._left -= count if is_enough else 0
        return is_enough


def tiling_error(shape: Shape, boxes: Sequence[Box], budget: CornerBudget) -> str | None:
    """What is wrong with boxes that must lie inside a tensor and hold each element once; None if they do."""
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"a piece at {list(offsets)} of {list(sizes)} has other dims than the shape {list(shape)}"
        if any(begin + size > end for begin, size, end in zip(offsets, sizes, shape, strict=True)):
            return f"a piece at {list(offsets)} of {list(sizes)} lies outside the shape {list(shape)}"
    filled = [box for box in boxes if math.prod(box[1])]
    if sum(math.prod(sizes) for _, sizes in filled) != math.prod(shape):
        held = sum(math.prod(sizes) for _, sizes in filled)
        return f"the pieces hold {held} elements of the {math.prod(shape)} in shape {list(shape)}"
    if not filled:
        return None
    cut = [dim for dim, length in enumerate(shape) if any(sizes[dim] != length for _, sizes in filled)]
    if not budget.take(len(filled) * 2 ** len(cut)):
        return f"{len(filled)} pieces along {len(cut)} dims are more than a checkpoint has"
    return None if _corners_cancel(shape, filled, cut) else "its pieces overlap"


def _corners_cancel(shape: Shape, boxes: Sequence[Box], cut: Sequence[int]) -> bool:
    corners: dict[Shape, int] = {}
    whole = ((0,) * len(shape), shape)
    # The corners of a box: what is added to its offsets, per dim that is cut, and the sign.
    kinds = [
        (list(zip(cut, ends, strict=True)), (-1) ** sum(ends)) for ends in product((0, 1), repeat=len(cut))
    ]
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in boxes)]:
        for ends, parity in kinds:
            place = tuple([offsets[dim] + end * sizes[dim] for dim, end in ends])
            corners[place] = corners.get(place, 0) + sign * parity
    return not any(corners.values())
