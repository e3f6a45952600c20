"""Positions and groups of ranks, as literal tables."""

import dataclasses
import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.collectives.mesh import Layout
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


def test_stages_with_different_replicas() -> None:
    ragged = layout("pipeline=3-1")
    assert not ragged.even
    assert ragged.groups("data") == ((0, 1, 2), (3,))
    assert ragged.groups("pipeline") == ((0, 1, 2, 3),)
    twice = layout("pipeline=2-1 data=2")
    assert twice.groups("data") == ((0, 1, 2, 3), (4, 5))
    assert twice.groups("pipeline") == ((0, 1, 4), (2, 3, 5))


def test_stages_with_equal_replicas_are_a_grid() -> None:
    assert layout("pipeline=2-2").even


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


def test_neighbours_shard_one_copy_and_ranks_with_the_same_part_are_copies() -> None:
    grid = layout("data=8 zero=3 shard=4")
    assert grid.groups("weights") == ((0, 1, 2, 3, 4, 5, 6, 7),)
    assert grid.groups("shard") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert grid.groups("copies") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (grid.position(6).part, grid.position(6).copy) == (2, 1)
    with_tensor = layout("data=4 tensor=2 zero=1 shard=2")
    assert with_tensor.groups("shard") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert with_tensor.groups("copies") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_a_sharding_group_may_begin_and_end_inside_a_replica() -> None:
    grid = layout("data=3 context=4 zero=1 shard=6")
    assert grid.groups("shard") == (tuple(range(6)), tuple(range(6, 12)))
    assert grid.groups("copies") == tuple((part, part + 6) for part in range(6))


def test_every_stage_has_sharding_groups_of_its_own() -> None:
    ragged = layout("pipeline=4-2 zero=1 shard=2")
    assert ragged.groups("shard") == ((0, 1), (2, 3), (4, 5))
    assert ragged.groups("copies") == ((0, 2), (1, 3), (4,), (5,))


@pytest.mark.parametrize("text", ["data=4 context=2 zero=1", "data=4 context=2 zero=1 shard=8"])
def test_without_groups_all_ranks_with_the_same_weights_shard_them(text: str) -> None:
    assert layout(text).same_groups("shard", "weights")
    assert layout(text).groups("copies") == tuple((rank,) for rank in range(8))


def test_the_group_through_a_rank() -> None:
    assert layout("data=4 tensor=2").group("data", 5) == (1, 3, 5, 7)


# The coordinates that ranks of one group have in common.
EQUAL_COORDINATES = {
    "all": "",
    "stage": "pipeline",
    "weights": "pipeline tensor",
    "shard": "pipeline copy tensor",
    "copies": "pipeline part tensor",
    "pipeline": "replica context tensor",
    "data": "pipeline context tensor",
    "context": "pipeline data tensor",
    "tensor": "pipeline data context",
    "expert": "pipeline expert_data context tensor",
    "expert_data": "pipeline expert context tensor",
    "experts": "pipeline expert tensor",
    "expert_shard": "pipeline expert copy tensor",
    "expert_copies": "pipeline expert expert_part tensor",
}

degrees = st.integers(1, 3)


@st.composite
def layouts(choice: st.DrawFn) -> Layout:
    expert, context = choice(degrees), choice(degrees)
    data = choice(degrees) * expert
    stages = choice(degrees | st.lists(degrees, min_size=2, max_size=4).map(tuple)) if expert == 1 else 2
    plan = Plan(data=data, expert=expert, tensor=choice(degrees), context=context, pipeline=stages, zero=1)
    ranks = math.gcd(*plan.replicas) * data * context
    groups = [size for size in range(2, ranks + 1) if ranks % size == 0]
    if expert > 1:
        groups = [size for size in groups if is_even(size, expert, context)]
    return Layout(dataclasses.replace(plan, shard=choice(st.sampled_from([0, *groups]))))


def is_even(shard: int, expert: int, context: int) -> bool:
    """Whether all groups of so many neighbours have as many ranks of each expert, where they have any."""
    experts = [cell // context % expert for cell in range(shard * expert * context)]
    counts = (Counter(experts[begin : begin + shard]) for begin in range(0, len(experts), shard))
    return len({number for count in counts for number in count.values()}) == 1


def groups_by_search(grid: Layout, axis: str) -> list[tuple[int, ...]]:
    """The groups along an axis, from a look at the position of every rank."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, position in enumerate(grid.positions):
        key = tuple(getattr(position, name) for name in EQUAL_COORDINATES[axis].split())
        members.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in members.values()]


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_a_group_is_the_ranks_with_equal_coordinates(grid: Layout) -> None:
    for axis in EQUAL_COORDINATES:
        expected = groups_by_search(grid, axis)
        assert grid.largest_group(axis) == max(map(len, expected))
        assert list(grid.groups(axis)) == expected
        for ranks in expected:
            assert {grid.group(axis, rank) for rank in (ranks[0], ranks[-1])} == {ranks}
            places = [grid.place(axis, rank) for rank in ranks]
            assert places == [(number, len(ranks)) for number in range(len(ranks))]


def columns_by_search(grid: Layout, stages: set[int]) -> list[tuple[int, ...]]:
    columns: dict[tuple[int, ...], list[int]] = {}
    for rank, position in enumerate(grid.positions):
        if position.pipeline in stages:
            replica = position.data if grid.even else position.replica
            columns.setdefault((replica, position.context, position.tensor), []).append(rank)
    return [tuple(ranks) for ranks in columns.values()]


@settings(deadline=None, max_examples=40)
@given(layouts(), st.data())
def test_a_column_is_the_ranks_of_some_stages_in_one_pipeline(grid: Layout, data: st.DataObject) -> None:
    stages = data.draw(st.sets(st.integers(0, grid.plan.stages - 1), min_size=1))
    expected = columns_by_search(grid, stages)
    assert list(grid.columns(stages)) == expected
    for column in expected:
        assert {grid.column(rank, stages) for rank in column} == {column}


def test_a_rank_of_another_stage_has_the_column_beside_it() -> None:
    assert layout("pipeline=3 data=2").column(3, {0, 2}) == (1, 5)


@settings(deadline=None, max_examples=40)
@given(layouts())
def test_axes_are_the_same_when_all_their_groups_are(grid: Layout) -> None:
    groups = {axis: grid.groups(axis) for axis in EQUAL_COORDINATES}
    for axis, other in itertools.combinations(EQUAL_COORDINATES, 2):
        assert grid.same_groups(axis, other) == (groups[axis] == groups[other]), (axis, other)


def test_positions_count_from_the_outermost_axis_to_the_innermost() -> None:
    grid = layout("pipeline=2-1 data=2 context=2 tensor=2")
    counted = itertools.chain(
        itertools.product((0,), range(4), range(2), range(2)),
        itertools.product((1,), range(2), range(2), range(2)),
    )
    assert [position[:4] for position in grid.positions] == list(counted)
    assert [grid.position(rank).replica for rank in (0, 15, 16, 23)] == [0, 1, 0, 1]


@pytest.mark.parametrize("text", ["data=8", "tensor=8", "pipeline=8"])
def test_one_axis_is_one_group(text: str) -> None:
    assert layout(text).groups(text.split("=")[0]) == (tuple(range(8)),)
