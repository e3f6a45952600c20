"""Slices of tensors: runs as boxes, and boxes of several ranks as whole tensors."""

import math
from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from echelon.launching import Ranks
from echelon.mesh import Mesh
from echelon.ownership import VALUE, OwnedSlice, Slice, assemble, own_run, run_slices, whole_slice
from echelon.plan import Plan

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


def pieces(rank: int) -> list[OwnedSlice]:
    """A row that both ranks hold, one of each rank, a tensor that both hold whole, and one of rank 1."""
    rows = [torch.tensor([[1.0, -0.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0, 6.0]])]
    held = [0, 1] if rank == 0 else [0, 2]
    owned = [OwnedSlice(Slice("w", VALUE, (3, 2), (row, 0), (1, 2)), rows[row]) for row in held]
    both = torch.tensor([7, 8])
    owned.append(OwnedSlice(whole_slice("both", both), both))
    if rank == 1:
        flag = torch.tensor(True)
        owned.append(OwnedSlice(whole_slice("flag", flag), flag))
    return owned


def assembled() -> tuple[dict[tuple[str, str], Tensor], int]:
    group = Mesh.join(Plan(data=2)).group("data")
    owned = pieces(group.rank)
    whole = assemble(owned, group, torch.device("cpu"))
    for _, tensor in owned:
        tensor.zero_()  # what was assembled are copies
    return whole, sum(move.operation == "all_reduce" for move in group.ledger.moves)


def test_what_several_ranks_hold_is_counted_once(warm_ranks: Callable[[int], Ranks]) -> None:
    for whole, num_sums in warm_ranks(2).run(assembled):
        assert {name: value.tolist() for (name, _), value in whole.items()} == {
            "w": [[1.0, -0.0], [3.0, 4.0], [5.0, 6.0]],
            "both": [7, 8],
            "flag": True,
        }
        assert str(whole["w", VALUE][0, 1].item()) == "-0.0"
        assert num_sums == 2, "what every rank holds whole is not sent"
