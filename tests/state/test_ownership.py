"""Slices of tensors: runs as boxes."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.state.ownership import OwnedSlice, Shard, Slice, own_run, run_slices, whole_slice

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


def test_a_fused_matrix_gives_a_part_of_each() -> None:
    whole = torch.arange(12).view(12, 1)
    taken = Shard(0, (4, 4, 4), rank=1, ranks=2).take(whole)
    assert taken.flatten().tolist() == [2, 3, 6, 7, 10, 11]


def test_unequal_parts_are_cut_each_by_itself() -> None:
    """Query, key and value with grouped heads: 8, 2 and 2 rows."""
    whole = torch.arange(12).view(1, 12)
    taken = Shard(1, (8, 2, 2), rank=0, ranks=2).take(whole)
    assert taken.flatten().tolist() == [0, 1, 2, 3, 8, 10]


def test_a_part_that_is_not_divisible_is_padded_with_zeros() -> None:
    """Some ranks may have nothing but padding."""
    whole = torch.arange(1, 6).view(1, 5, 1)
    taken = [Shard(1, (5,), rank, ranks=4).take(whole).flatten().tolist() for rank in range(4)]
    assert taken == [[1, 2], [3, 4], [5, 0], [0, 0]]


def test_one_number_is_of_the_whole_parameter() -> None:
    step = OwnedSlice(Slice("w", "step", (), (), ()), torch.tensor(3.0))
    assert Shard(0, (4,), 0, 2).in_whole(step) == [step]


@given(
    ranks=st.integers(1, 4),
    parts=st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple),
    other=st.integers(1, 3),
    dim=st.integers(0, 1),
    cuts=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_the_boxes_of_all_ranks_are_the_whole(
    ranks: int, parts: tuple[int, ...], other: int, dim: int, cuts: tuple[int, int]
) -> None:
    """Also when a rank owns just a run of its share (ZeRO) and says so in boxes, and without padding."""
    shape = (sum(parts), other) if dim == 0 else (other, sum(parts))
    whole = torch.arange(sum(parts) * other).view(shape)
    found = torch.full(shape, -1)
    for rank in range(ranks):
        shard = Shard(dim, parts, rank, ranks)
        share = shard.take(whole)
        assert shard.whole_shape(tuple(share.shape)) == shape
        ends = sorted({0, *(min(cut, share.numel()) for cut in cuts), share.numel()})
        for begin, end in itertools.pairwise(ends):
            for box in run_slices("w", tuple(share.shape), begin, end):
                for piece in shard.in_whole(OwnedSlice(box, share[box.box])):
                    assert (found[piece.slice.box] == -1).all()
                    found[piece.slice.box] = piece.tensor
    assert torch.equal(found, whole)


def test_a_box_keeps_what_else_is_said_of_it() -> None:
    box = whole_slice("w", torch.zeros(2, 3), "exp_avg")
    (moved,) = Shard(0, (4,), 1, 2).in_whole(OwnedSlice(box, torch.zeros(2, 3)))
    assert moved.slice == Slice("w", "exp_avg", (4, 3), (2, 0), (2, 3))
