"""Positions and groups of ranks, as literal tables."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.mesh import Layout
from echelon.plan import Plan


def layout(text: str) -> Layout:
    return Layout(Plan.parse(text))


def test_three_axes() -> None:
    grid = layout("data=2 tensor=2 pipeline=2")
    assert [p[:4] for p in grid.positions] == [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 1, 0, 0),
        (0, 1, 0, 1),
        (1, 0, 0, 0),
        (1, 0, 0, 1),
        (1, 1, 0, 0),
        (1, 1, 0, 1),
    ]
    assert grid.groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.groups("data") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.groups("pipeline") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.shape == (2, 2, 1, 2)


def test_stages_with_different_replicas() -> None:
    ragged = layout("pipeline=3-1")
    assert not ragged.even
    assert ragged.groups("data") == ((0, 1, 2), (3,))
    assert ragged.groups("pipeline") == ((0, 1, 2, 3),)
    twice = layout("pipeline=2-1 data=2")
    assert twice.groups("data") == ((0, 1, 2, 3), (4, 5))
    assert twice.groups("pipeline") == ((0, 1, 4), (2, 3, 5))


def test_stages_with_equal_replicas_are_a_grid() -> None:
    assert layout("pipeline=2-2").shape == (2, 2, 1, 1)


def test_experts_live_on_the_data_ranks() -> None:
    grid = layout("data=4 expert=2 tensor=2")
    assert grid.plan.ranks == 8
    assert grid.groups("expert") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.groups("expert_data") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.groups("data") == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_ranks_along_data_and_context_have_the_same_weights() -> None:
    grid = layout("data=2 context=2 tensor=2")
    assert grid.groups("weights") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert grid.groups("data") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.groups("context") == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_the_group_through_a_rank() -> None:
    assert layout("data=4 tensor=2").group("data", 5) == (1, 3, 5, 7)


degrees = st.integers(1, 4)


@given(
    data=degrees,
    tensor=degrees,
    context=degrees,
    stages=degrees | st.lists(degrees, min_size=2, max_size=4).map(tuple),
)
def test_every_rank_is_in_one_group_along_each_axis(
    data: int, tensor: int, context: int, stages: int | tuple[int, ...]
) -> None:
    grid = Layout(Plan(data=data, tensor=tensor, context=context, pipeline=stages))
    for axis in ("pipeline", "data", "context", "tensor"):
        assert sorted(itertools.chain(*grid.groups(axis))) == list(range(grid.plan.ranks))
    assert {len(ranks) for ranks in grid.groups("tensor")} == {tensor}
    assert {len(ranks) for ranks in grid.groups("pipeline")} == {sum(grid.plan.replicas)}


@pytest.mark.parametrize("text", ["data=8", "tensor=8", "pipeline=8"])
def test_one_axis_is_one_group(text: str) -> None:
    assert layout(text).groups(text.split("=")[0]) == (tuple(range(8)),)
