"""The two sums of a gradient: which is on the way when. Groups take effect when they are waited for."""

import pytest
import torch
from torch import nn

from echelon.collectives import Ledger
from echelon.parallel.data.parameter_set import ShardGroups
from echelon.parallel.data.zero.flat import FlatUnit
from echelon.parallel.data.zero.gradient_sums import GradientSums
from tests.groups import DeferredGroup, PartialGroup

pytestmark = pytest.mark.usefixtures("packed")

FIRST, SECOND = ("shard", "reduce_scatter"), ("copies", "all_reduce")


class NeverCalled(PartialGroup):
    """The only copy: a stage of fewer replicas than others, whose ranks have nobody to sum with."""

    def __init__(self) -> None:
        super().__init__("copies", 0, 1, Ledger())


class Sums:
    """Two ranks that shard each of three copies; this rank is the second of its group."""

    def __init__(self, *, in_place: bool, copies: int = 3, units: int = 3) -> None:
        self.shard = DeferredGroup("shard", rank=1, size=2)
        self.copies = DeferredGroup("copies", size=copies) if copies > 1 else NeverCalled()
        self.copies.ledger = self.shard.ledger
        self.units = [
            FlatUnit(str(unit), [("w", nn.Parameter(torch.zeros(4)))], self.shard, sharded=False)
            for unit in range(units)
        ]
        self.sums = GradientSums(ShardGroups(self.shard, self.copies), in_place=in_place)

    def start(self, unit: int, *, last: bool = True) -> None:
        """A gradient of 1, 2, 3, 4."""
        parameter = self.units[unit].parameters[0][1]
        parameter.grad = torch.arange(1.0, 5.0)
        self.units[unit].gradient.accumulate(parameter)
        self.sums.start(self.units[unit].gradient, last=last)

    @property
    def begun(self) -> list[tuple[str, str]]:
        assert {move.subject for move in self.shard.ledger.moves} <= {"gradients"}
        return [(move.axis, move.operation) for move in self.shard.ledger.moves]

    @property
    def num_pending(self) -> int:
        second = self.copies.pending if isinstance(self.copies, DeferredGroup) else []
        return len(self.shard.pending) + len(second)

    def parts(self) -> list[list[float]]:
        return [unit.gradient.part.tolist() for unit in self.units if unit.gradient.part is not None]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_part_is_summed_over_its_group_and_then_over_the_copies(in_place: bool) -> None:
    sums = Sums(in_place=in_place, units=1)
    sums.start(0)
    sums.sums.complete()
    assert sums.parts() == [[3.0 * 2 * 3, 4.0 * 2 * 3]]
    assert sums.num_pending == 0


def test_a_second_sum_begins_while_the_next_gradient_is_produced() -> None:
    """One unit later: its first sum has had that long, and nobody waits for the second."""
    sums = Sums(in_place=False)
    sums.start(0)
    assert sums.begun == [FIRST]
    sums.start(1)
    assert sums.begun == [FIRST, FIRST, SECOND]
    sums.start(2)
    assert sums.begun == [FIRST, FIRST, SECOND, FIRST, SECOND]
    assert sums.num_pending == 3, "the last first sum, and both second ones"
    sums.sums.complete()
    assert sums.begun == [FIRST, FIRST, SECOND, FIRST, SECOND, SECOND]
    assert sums.parts() == [[18.0, 24.0]] * 3


@pytest.mark.parametrize("copies", [1, 3])
def test_no_backward_pass_waits_for_sums_in_place(copies: int) -> None:
    """Replicas that take microbatches in turn waited for each other forever: one in its backward pass for a
    sum, the other for an activation that is computed after this backward pass."""
    sums = Sums(in_place=True, copies=copies)
    for unit in range(3):
        sums.start(unit)
    assert sums.begun == [FIRST] * 3
    assert sums.num_pending == 3
    sums.sums.complete()
    assert sums.begun == [FIRST] * 3 + [SECOND] * (3 if copies > 1 else 0)
    assert sums.parts() == [[6.0 * copies, 8.0 * copies]] * 3


def test_of_several_microbatches_only_the_last_is_summed_over_the_copies() -> None:
    """The first sums of an earlier microbatch may end in a later one: that is not yet their turn."""
    sums = Sums(in_place=False, units=2)
    for last in (False, False, True):
        sums.start(0, last=last)
        sums.start(1, last=last)
    sums.sums.complete()
    assert sums.begun == [*[FIRST] * 6, SECOND, SECOND]
    assert sums.parts() == [[3 * 18.0, 3 * 24.0]] * 2


def test_with_one_copy_the_first_sum_is_all() -> None:
    sums = Sums(in_place=False, copies=1)
    for unit in range(3):
        sums.start(unit)
        assert sums.num_pending == 1, "memory of whole gradients is bounded"
    sums.sums.complete()
    assert sums.begun == [FIRST] * 3
    assert sums.parts() == [[6.0, 8.0]] * 3


@pytest.mark.parametrize("in_place", [True, False])
def test_what_a_failed_step_left_is_waited_for_and_summed_no_further(in_place: bool) -> None:
    sums = Sums(in_place=in_place)
    sums.start(0)
    sums.start(1)
    begun = sums.begun
    assert begun == [FIRST, FIRST] + [SECOND] * (not in_place)
    sums.sums.drop()
    assert sums.num_pending == 0
    sums.sums.complete()
    assert sums.begun == begun, "nothing is left of it"


def lose_first(group: DeferredGroup) -> None:
    """The operation that began first will fail."""

    def fail() -> None:
        raise RuntimeError("lost a peer")

    group.pending[0]._finish = fail  # type: ignore[attr-defined]


def test_a_second_sum_that_failed_is_not_waited_for_again_and_the_others_are() -> None:
    sums = Sums(in_place=False)
    for unit in range(3):
        sums.start(unit)
    lose_first(sums.copies)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="lost a peer"):
        sums.sums.complete()
    sums.sums.drop()  # the next step begins
    assert sums.num_pending == 0


def test_what_a_failed_step_left_is_waited_for_even_if_the_first_of_it_fails() -> None:
    sums = Sums(in_place=False)
    for unit in range(3):
        sums.start(unit)
    lose_first(sums.shard)
    with pytest.raises(RuntimeError, match="lost a peer"):
        sums.sums.drop()
    assert sums.num_pending == 0
    sums.sums.drop()
