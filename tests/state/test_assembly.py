"""Boxes of several ranks as whole tensors."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from echelon.collectives import RecordingGroup
from echelon.collectives.mesh import Mesh
from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.state.assembly import Assembly, assemble
from echelon.state.ownership import VALUE, OwnedSlice, Slice, whole_slice


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


def to_the_second() -> list[list[object] | None]:
    """What rank 1 alone asks for."""
    group = Mesh.join(Plan(data=2)).group("data")
    assembly = Assembly(pieces(group.rank), group, torch.device("cpu"))
    tensors = [assembly.tensor(key, to=1) for key in sorted(assembly)]
    return [None if tensor is None else tensor.tolist() for tensor in tensors]


def test_one_rank_alone_gets_whole_tensors(warm_ranks: Callable[[int], Ranks]) -> None:
    assert warm_ranks(2).run(to_the_second) == [
        [None, None, None],
        [[7, 8], True, [[1.0, -0.0], [3.0, 4.0], [5.0, 6.0]]],
    ]


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


def rows(name: str, whole: Tensor, begin: int, end: int) -> OwnedSlice:
    box = Slice(name, VALUE, tuple(whole.shape), (begin, 0), (end - begin, whole.shape[1]))
    return OwnedSlice(box, whole[begin:end])


def half_and_whole() -> list[list[int]]:
    """Rank 0 holds two halves of a tensor, and rank 1 all of it."""
    group = Mesh.join(Plan(data=2)).group("data")
    whole = torch.arange(1, 9).view(4, 2)
    edges = (0, 2, 4) if group.rank == 0 else (0, 4)
    owned = [rows("w", whole, *pair) for pair in pairwise(edges)]
    assembled: list[list[int]] = assemble(owned, group, torch.device("cpu"))["w", VALUE].tolist()
    return assembled


def test_parts_are_not_added_to_what_another_rank_holds_whole(warm_ranks: Callable[[int], Ranks]) -> None:
    assert warm_ranks(2).run(half_and_whole) == [[[1, 2], [3, 4], [5, 6], [7, 8]]] * 2


@pytest.mark.parametrize(("edges", "held"), [([(0, 3)], 6), ([(0, 3), (2, 4)], 10)])
def test_boxes_that_leave_a_gap_or_overlap_are_not_summed(edges: list[tuple[int, int]], held: int) -> None:
    """Zeros would be there, or the bytes of both: stages once cut a frozen tied weight at different rows."""
    owned = [rows("w", torch.ones(4, 2), *pair) for pair in edges]
    with pytest.raises(AssertionError, match=rf"w \(value\) of shape \(4, 2\): .* hold {held} elements"):
        Assembly(owned, RecordingGroup("all"), torch.device("cpu"))
