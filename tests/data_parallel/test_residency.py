"""Units are gathered while they are used, and the next ones ahead."""

import pytest
import torch
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.data_parallel.flat import FlatUnit
from echelon.data_parallel.residency import Residency


def make_residency(
    needs: list[list[int]],
    prefetch: int = 0,
    root: int | None = None,
    group: RecordingGroup | None = None,
) -> tuple[Residency, list[list[FlatUnit]]]:
    group = group or RecordingGroup("data")
    units = [
        [FlatUnit(str(index), [("w", nn.Parameter(torch.ones(4)))], group, resident=False)]
        for index in range(len(needs))
    ]
    residency = Residency(units, needs, prefetch, group.ledger, root)
    residency.reset()
    return residency, units


def gathered(units: list[list[FlatUnit]]) -> set[int]:
    return {index for index, (flat,) in enumerate(units) if flat.is_gathered}


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("backward", [False, True])
def test_the_next_units_are_gathered_ahead_in_the_direction_of_the_pass(
    prefetch: int, backward: bool
) -> None:
    residency, units = make_residency([[0], [1], [2], [3]], prefetch)
    order = [3, 2, 1, 0] if backward else [0, 1, 2, 3]
    for place, index in enumerate(order):
        residency.enter(index, backward=backward)
        assert gathered(units) == set(order[place : place + 1 + prefetch])
        residency.leave(index)
    assert gathered(units) == set()


def test_a_unit_stays_until_its_last_user_leaves() -> None:
    residency, units = make_residency([[0], [0, 1]])
    residency.enter(0, backward=False)
    residency.enter(1, backward=False)  # a tied weight: it needs the first unit too
    assert gathered(units) == {0, 1}
    residency.leave(1)
    assert gathered(units) == {0}
    residency.leave(0)
    assert gathered(units) == set()


def test_the_order_is_that_of_the_last_forward_pass() -> None:
    residency, units = make_residency([[0], [1], [2]], prefetch=1)
    for index in (2, 0, 1):
        residency.enter(index, backward=False)
        residency.leave(index)
    residency.reset()
    residency.enter(2, backward=False)
    assert gathered(units) == {2, 0}


def test_what_surrounds_the_others_is_entered_first_both_ways() -> None:
    for backward, following in ((False, {0, 2}), (True, {1, 2})):
        residency, units = make_residency([[0], [1], [2]], prefetch=1, root=2)
        residency.enter(2, backward=backward)
        assert gathered(units) == following


def test_what_was_gathered_ahead_and_has_no_user_can_be_freed() -> None:
    residency, units = make_residency([[0], [1], [2]], prefetch=1)
    residency.ahead(backward=True)
    assert gathered(units) == {2, 1}
    residency.enter(2, backward=True)
    residency.free_unused()
    assert gathered(units) == {2}
    assert residency.num_gathered == 1
    residency.reset()
    assert residency.num_gathered == 0


def test_entering_waits_for_what_is_needed_and_not_for_what_comes_next() -> None:
    group = RecordingGroup("data", 0, 2)
    residency, _ = make_residency([[0], [1], [2]], prefetch=1, group=group)
    residency.enter(0, backward=False)
    assert [move.wait_start > 0 for move in group.ledger.moves] == [True, False]
    residency.enter(1, backward=False)
    assert [move.wait_start > 0 for move in group.ledger.moves] == [True, True, False]
