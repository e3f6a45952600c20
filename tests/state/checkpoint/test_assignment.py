"""Who writes what, and how it is known that this has changed."""

import pytest
import torch

from echelon.state.assembly import RankSlice
from echelon.state.checkpoint.assignment import share_out, signature
from echelon.state.ownership import OwnedSlice, Slice


def owned(name: str = "w", begin: int = 0, size: int = 2, dtype: torch.dtype = torch.float32) -> OwnedSlice:
    return OwnedSlice(Slice(name, "value", (4,), (begin,), (size,)), torch.zeros(size, dtype=dtype))


def test_what_is_owned_has_one_signature() -> None:
    assert signature([owned()]) == signature([owned()])
    others = [
        [],
        [owned(name="v")],
        [owned(begin=1)],
        [owned(size=3)],
        [owned(dtype=torch.float64)],
        [owned(), owned()],
    ]
    assert len({signature(each) for each in ([owned()], *others)}) == len(others) + 1


def whole(name: str, length: int, owner: int, dtype: str = "float32") -> RankSlice:
    return RankSlice(Slice(name, "value", (length,), (0,), (length,)), dtype, owner)


def part(name: str, begin: int, size: int, owner: int, length: int = 8) -> RankSlice:
    return RankSlice(Slice(name, "value", (length,), (begin,), (size,)), "float32", owner)


def written(*lists: list[RankSlice]) -> list[list[tuple[str, int]]]:
    return [[(box.name, box.offsets[0]) for box in of_rank] for of_rank in share_out(lists)]


def test_replicas_share_what_all_of_them_hold_by_its_bytes() -> None:
    lengths = {"a": 2, "b": 10, "c": 5, "d": 4}
    lists = [[whole(name, length, rank) for name, length in lengths.items()] for rank in (0, 1)]
    assert written(*lists) == [[("b", 0)], [("c", 0), ("d", 0), ("a", 0)]]


def test_a_wider_type_counts_for_more() -> None:
    lists = [[whole("a", 10, r), whole("b", 8, r, "float64"), whole("c", 1, r)] for r in (0, 1)]
    assert written(*lists) == [[("b", 0)], [("a", 0), ("c", 0)]]


def test_equal_ones_by_rank_and_name() -> None:
    lists = [[whole(name, 4, rank) for name in "ba"] for rank in (0, 1)]
    assert written(*lists) == [[("a", 0)], [("b", 0)]]


def test_parts_are_written_by_those_who_hold_them() -> None:
    assert written([part("a", 0, 6, 0)], [part("a", 6, 2, 1)]) == [[("a", 0)], [("a", 6)]]
    assert written([part("a", 0, 6, 0), whole("b", 4, 0)], [part("a", 6, 2, 1), whole("b", 4, 1)]) == [
        [("a", 0)],
        [("b", 0), ("a", 6)],
    ]


def test_a_whole_one_is_written_instead_of_parts() -> None:
    assert written([part("a", 0, 6, 0)], [whole("a", 8, 1)]) == [[], [("a", 0)]]
    stacked = RankSlice(Slice("a", "value", (8,), (0,), (8,)), "float32", 2)
    assert written([part("a", 0, 6, 0)], [whole("a", 8, 1)], [stacked]) == [[], [("a", 0)], []]


def test_parts_that_are_missing_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="all ranks hold 6 elements"):
        written([part("a", 0, 6, 0)], [])
