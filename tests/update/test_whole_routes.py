"""Which rank updates which whole parameter."""

from echelon.state.ownership import Slice
from echelon.update.whole_routes import assign


def box(size: int) -> list[Slice]:
    """Of a parameter of `size` elements."""
    return [Slice("p", "value", (size,), (0,), (1,))]


def test_the_largest_go_first_each_to_whoever_has_the_least() -> None:
    everything = {"a": box(2), "b": box(9), "c": box(5), "d": box(4)}
    assert assign([everything, everything]) == {"b": 0, "c": 1, "d": 1, "a": 0}


def test_only_a_rank_that_holds_a_part_updates() -> None:
    assert assign([{}, {"a": box(2), "b": box(3)}, {"b": box(3)}]) == {"b": 1, "a": 1}
