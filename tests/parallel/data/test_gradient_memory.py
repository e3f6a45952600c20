"""Preallocated memory for gradients on their way: one for any unit, free when its sum has been waited for."""

import pytest
import torch
from torch import nn

from echelon.nn.wrapping import Wrapping
from echelon.parallel.data import ShardGroups
from echelon.parallel.data.gradient_memory import GradientKind, PreallocatedMemory
from echelon.parallel.data.gradient_sums import GradientSums
from echelon.parallel.data.zero.flat import FlatUnit, UnitMemory
from echelon.parallel.data.zero.zero import Zero
from tests.groups import DeferredGroup
from tests.peak_memory import PeakMemory
from tests.sets import set_of

FLOAT32 = GradientKind(torch.float32, torch.device("cpu"))


def test_any_buffer_is_as_large_as_the_largest() -> None:
    memory = PreallocatedMemory([(64, FLOAT32), (1024, FLOAT32)])
    small, large = memory.take(64, FLOAT32), memory.take(1024, FLOAT32)
    assert (small.numel(), large.numel()) == (64, 1024)
    memory.give_back(small)
    again = memory.take(1024, FLOAT32)
    assert again.data_ptr() == small.data_ptr()
    assert {buffer.data_ptr() for buffer in memory.storages()} == {small.data_ptr(), large.data_ptr()}


def test_more_buffers_are_made_where_more_gradients_are_open_and_stay() -> None:
    memory = PreallocatedMemory([(8, FLOAT32)])
    taken = [memory.take(8, FLOAT32) for _ in range(3)]
    pointers = {each.data_ptr() for each in taken}
    assert len(pointers) == 3
    for each in taken:
        memory.give_back(each)
    assert {memory.take(8, FLOAT32).data_ptr() for _ in range(3)} == pointers
    memory.give_back(taken[0])
    with pytest.raises(AssertionError, match="twice"):
        memory.give_back(taken[0])


class Sums:
    """Three units whose sums take effect when they are waited for."""

    def __init__(self) -> None:
        self.group = DeferredGroup("shard", rank=1, size=2)
        self.units = [
            FlatUnit(str(size), [("w", nn.Parameter(torch.zeros(size)))], self.group, resident=True)
            for size in (100, 300, 200)
        ]
        self.memory = UnitMemory.preallocated(self.units)
        for unit in self.units:
            unit.memory = self.memory
        copies = DeferredGroup("copies", size=2)
        self.sums = GradientSums(ShardGroups(self.group, copies), in_place=False)

    def backward(self, value: float, *, last: bool) -> None:
        for number, unit in enumerate(self.units):
            parameter = unit.parameters[0][1]
            parameter.grad = torch.full_like(parameter, (1 + number) * value)
            unit.accumulate(parameter)
            self.sums.start(unit, last=last)

    def pointers(self) -> set[int]:
        return {storage.data_ptr() for storage in self.memory.storages()}

    def finish(self) -> list[float]:
        """What the parts of all units hold: the sum over two ranks of each of two groups."""
        self.sums.complete()
        values = [float(unit.part[0]) for unit in self.units if unit.part is not None]
        for unit in self.units:
            unit.has_part = False
        return values


def test_sums_of_several_microbatches_are_right_and_take_no_new_memory() -> None:
    sums = Sums()
    sums.backward(1.0, last=False)
    sums.backward(2.0, last=True)
    assert sums.finish() == [12.0, 24.0, 36.0]
    before = sums.pointers()
    with PeakMemory() as memory:
        sums.backward(3.0, last=False)
        sums.backward(4.0, last=True)
        assert sums.finish() == [28.0, 56.0, 84.0]
    assert sums.pointers() == before
    # The gradient that autograd makes, and what the group computes; no buffer of a unit beside them.
    assert memory.peak <= 3 * 4 * 320
    assert len(before) == 4, "two gradients, and two parts that are added"


def test_a_step_that_failed_gives_its_memory_back() -> None:
    sums = Sums()
    sums.backward(1.0, last=False)
    sums.sums.drop()
    for unit in sums.units:
        unit.drop_gradient()
        unit.has_part = False
    before = sums.pointers()
    sums.backward(2.0, last=True)
    assert sums.finish() == [8.0, 16.0, 24.0]
    assert sums.pointers() == before


@pytest.mark.parametrize("level", [2, 3])
def test_the_buffers_of_a_sharing_are_counted_as_gradients(level: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 32, bias=False))
    parameters = set_of(model, DeferredGroup())
    zero = Zero(parameters, level, Wrapping(), contiguous=True)
    assert sum(each.nbytes for each in zero.storages().gradients) == 2 * 4 * 256
