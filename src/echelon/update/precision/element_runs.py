"""Where the elements of a rank's part of a parameter lie in the whole one: in runs of one length.

    whole 3 × 8          this rank: columns 4 to 7       part 3 × 4, in order
    . . . . a a a a      run 0 begins at  4              a a a a b b b b c c c c
    . . . . b b b b      run 1 begins at 12
    . . . . c c c c      run 2 begins at 20

What depends on an element's index in the whole parameter, and on nothing else, does not depend on the plan.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.state.ownership import OwnedSlice


class ElementRuns(NamedTuple):
    """Runs of `length` elements: where each begins in the flattened part, and in the flattened whole."""

    in_part: Tensor  # int64, on the part's device
    in_whole: Tensor
    length: int


def runs_of(boxes: Iterable[OwnedSlice], device: torch.device) -> list[ElementRuns]:
    """The runs of boxes of the whole, whose tensors are views of one flat part."""
    return [_runs(box, device) for box in boxes if box.slice.numel]


def whole_run(tensor: Tensor) -> ElementRuns:
    """That of a whole parameter."""
    begin = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    return ElementRuns(begin, begin, tensor.numel())


def _runs(box: OwnedSlice, device: torch.device) -> ElementRuns:
    """Elements are consecutive from the last dim on of which the box does not have all."""
    _, _, shape, offsets, sizes = box.slice
    cut = max((dim for dim, size in enumerate(sizes) if size < shape[dim]), default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    in_whole = first + _grid(sizes[:cut], strides[:cut])
    in_part = int(box.tensor.storage_offset()) + _grid(sizes[:cut], box.tensor.stride()[:cut])
    return ElementRuns(in_part.to(device), in_whole.to(device), math.prod(sizes[cut:]))


def _grid(sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The place of every index of outer dims, in order."""
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(sizes, strides, strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places
