"""Slices of tensors: runs as boxes."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.state.ownership import own_run, run_slices

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


def test_the_picture() -> None:
    boxes = [(box.offsets, box.sizes) for box in run_slices("w", (3, 4), 2, 9)]
    assert boxes == [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]


@given(shapes, st.data())
def test_boxes_are_the_run_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    whole = torch.arange(size).view(shape)
    boxes = run_slices("w", shape, begin, end)
    found = torch.cat([torch.empty(0, dtype=torch.int64), *(whole[box.box].flatten() for box in boxes)])
    assert torch.equal(found, torch.arange(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box, piece in own_run(torch.arange(begin, end), boxes):
        assert torch.equal(piece, whole[box.box])
