"""Which units are gathered, by literal sequences of what is entered and left."""

import pytest
import torch
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.parallel.data.sharing import Problem
from echelon.parallel.data.zero.flat import FlatUnit
from echelon.parallel.data.zero.residency import Residency
from tests.groups import DeferredGroup
from tests.reads import no_reads


class Units:
    """Units of one weight each, over a group that takes effect when it is waited for."""

    def __init__(
        self,
        number: int = 4,
        prefetch: int = 1,
        root: int | None = None,
        needs: list[list[int]] | None = None,
    ) -> None:
        self.group = DeferredGroup()
        self.flats = [
            FlatUnit(str(unit), [("w", nn.Parameter(torch.ones(2)))], self.group, sharded=True)
            for unit in range(number)
        ]
        self.residency = Residency(
            [[flat] for flat in self.flats],
            needs or [[unit] for unit in range(number)],
            prefetch,
            self.group.ledger,
            root,
        )
        self.residency.reset()

    @property
    def gathered(self) -> list[int]:
        return [unit for unit, flat in enumerate(self.flats) if flat.is_gathered]

    def enter(self, unit: int, *, backward: bool = False) -> list[int]:
        self.residency.enter(unit, backward=backward)
        return self.gathered

    def leave(self, unit: int) -> list[int]:
        self.residency.leave(unit)
        return self.gathered

    def run(self, *order: int) -> None:
        for unit in order:
            self.enter(unit)
            self.leave(unit)


def test_a_unit_is_gathered_with_the_next_and_freed_when_it_is_left() -> None:
    units = Units()
    assert units.gathered == []
    assert units.enter(0) == [0, 1]
    assert units.leave(0) == [1]
    assert units.enter(1) == [1, 2]
    assert units.leave(1) == [2]
    assert units.residency.num_gathered == 1


def test_the_way_back_gathers_in_reverse() -> None:
    units = Units()
    assert units.enter(3, backward=True) == [2, 3]
    assert units.leave(3) == [2]
    assert units.enter(2, backward=True) == [1, 2]
    units.leave(2)
    assert units.enter(0, backward=True) == [0, 1], "nothing comes after the first"


@pytest.mark.parametrize(("prefetch", "expected"), [(0, [1]), (1, [1, 2]), (2, [1, 2, 3]), (9, [1, 2, 3])])
def test_as_many_units_ahead_as_asked_for(prefetch: int, expected: list[int]) -> None:
    assert Units(prefetch=prefetch).enter(1) == expected


def test_a_unit_that_is_entered_is_there_and_the_next_is_on_its_way() -> None:
    units = Units()
    units.enter(0)
    assert len(units.group.pending) == 1, "that of unit 1"
    units.leave(0)
    units.enter(1)
    assert len(units.group.pending) == 1, "that of unit 2"


def test_a_unit_that_two_use_is_freed_with_the_last() -> None:
    units = Units(prefetch=0)
    assert units.enter(0) == [0]
    assert units.enter(0) == [0]
    assert units.leave(0) == [0]
    assert units.leave(0) == []


def test_what_a_unit_needs_is_gathered_with_it() -> None:
    """The last layer has the weight of the first."""
    units = Units(3, prefetch=0, needs=[[0], [1], [0, 2]])
    assert units.enter(2) == [0, 2]
    assert units.enter(0) == [0, 2]
    assert units.leave(0) == [0, 2], "the last layer needs it still"
    assert units.leave(2) == []


def test_the_order_of_the_last_forward_pass_is_the_order_of_the_next() -> None:
    units = Units()
    units.run(2, 0, 2, 3, 1)
    units.residency.reset()
    assert units.enter(2) == [0, 2]
    units.leave(2)
    units.residency.reset()
    units.run(2, 0, 3, 1)
    units.residency.reset()
    assert units.enter(1, backward=True) == [1, 3]


def test_the_backward_pass_does_not_count_as_an_order() -> None:
    units = Units()
    for unit in (3, 2, 1, 0):
        units.enter(unit, backward=True)
        units.leave(unit)
    units.run(0, 1, 2, 3)
    units.residency.reset()
    assert units.enter(0) == [0, 1]


def test_a_unit_that_the_last_pass_did_not_use_has_no_next() -> None:
    units = Units()
    units.run(0, 1)
    units.residency.reset()
    assert units.enter(3) == [3]


def test_around_the_others_the_root_is_entered_first_both_ways() -> None:
    units = Units(root=3)
    assert units.enter(3) == [0, 3]
    units.residency.reset()
    units.run(3, 0, 1, 2)
    units.residency.reset()
    assert units.enter(3, backward=True) == [2, 3]


def test_ahead_begins_with_what_comes_first_and_free_unused_gives_it_back() -> None:
    units = Units()
    units.residency.ahead(backward=False)
    assert units.gathered == [0, 1]
    units.residency.free_unused()
    assert units.gathered == []
    units.residency.ahead(backward=True)
    assert units.gathered == [2, 3]
    units.enter(3, backward=True)
    units.residency.free_unused()
    assert units.gathered == [3], "what is in use stays"


def test_a_reset_frees_everything_also_what_a_failed_step_has_left() -> None:
    units = Units()
    units.enter(0)
    units.enter(1)
    units.residency.reset()
    assert units.gathered == []
    assert units.group.pending == []
    assert units.enter(0) == [0, 1]
    assert units.leave(0) == [1], "users are counted from 0 again"


def test_frozen_integers_may_be_a_second_memory_of_a_unit() -> None:
    group = RecordingGroup("data", 0, 2)
    kinds = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.arange(2), requires_grad=False)]
    flats = [FlatUnit("0", [("w", kind)], group, sharded=True) for kind in kinds]
    residency = Residency([flats], [[0]], 0, group.ledger, None)
    residency.reset()
    assert residency.num_gathered == 0
    residency.enter(0, backward=False)
    assert [flat.is_gathered for flat in flats] == [True, True]
    assert residency.num_gathered == 1


class Pair(Units):
    """One of two ranks, which compares what it gathered with the other."""

    def differs_from(self, other: Units) -> bool:
        number = other.residency._gathered

        def all_reduce(tensor: torch.Tensor, op: str) -> None:
            assert op == "max"
            tensor.copy_(torch.maximum(tensor, torch.tensor([number, -number])))

        self.group.all_reduce = all_reduce  # type: ignore[assignment, method-assign]
        with no_reads():
            problems = self.residency.compare(self.group)
        assert problems.keys() == {Problem.DIFFERENT_UNITS}
        return bool(problems[Problem.DIFFERENT_UNITS])


@pytest.mark.parametrize(
    ("first", "second"), [([0], [1]), ([0, 1], [1, 0]), ([0], [0, 0]), ([0, 1], [0]), ([], [0])]
)
def test_ranks_that_gathered_different_units_are_told_apart(first: list[int], second: list[int]) -> None:
    own, other = Pair(prefetch=0), Pair(prefetch=0)
    own.run(*first)
    other.run(*second)
    assert own.differs_from(other)
    assert other.differs_from(own)


def test_ranks_that_gathered_the_same_units_agree() -> None:
    own, other = Pair(prefetch=0), Pair(prefetch=0)
    for rank in (own, other):
        rank.run(0, 1, 2)
    assert not own.differs_from(other)
    own.run(3)
    assert own.differs_from(other)
    own.residency.reset()
    other.residency.reset()
    assert not own.differs_from(other)


def test_weights_that_stay_need_no_agreement() -> None:
    group = DeferredGroup()
    flat = FlatUnit("0", [("w", nn.Parameter(torch.ones(2)))], group, sharded=False)
    assert Residency([[flat]], [[0]], 1, group.ledger, None).compare(group) == {}
    assert group.ledger.moves == []


def test_a_second_run_finds_the_unit_of_its_backward_pass_and_gathers_nothing_ahead() -> None:
    units = Units()
    units.run(0, 1, 2, 3)
    assert units.enter(2, backward=True) == [1, 2]
    units.residency.enter_again(2)
    assert units.gathered == [1, 2], "what was gathered ahead stays"
    assert units.leave(2) == [1, 2], "the backward pass still needs it"
    assert units.leave(2) == [1]
    units.residency.reset()
    assert units.residency._sequence == [0, 1, 2, 3], "a second run is no forward pass"


def test_a_second_run_of_another_unit_takes_the_place_of_what_was_gathered_ahead() -> None:
    units = Units()
    units.run(0, 1, 2, 3)
    assert units.enter(3, backward=True) == [2, 3]
    units.residency.enter_again(1)
    assert units.gathered == [1, 3]
    assert units.leave(1) == [3]
    units.residency.enter_again(2)
    assert units.gathered == [2, 3]
