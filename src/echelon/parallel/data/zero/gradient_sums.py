"""Gradients of units, and their sums over the ranks that hold the parts: two sums, one after the other.

    reduce-scatter along `shard`    of the whole gradient: each rank that shards a copy gets its part
    all-reduce along `copies`       of that part, over the ranks that hold the same one of other copies

Where there is one copy, the first sum is all. The second one is made once per step: the parts of earlier
microbatches only add up. It begins when the first is complete: while the backward pass goes on, where that
waits for first sums to bound the memory of whole gradients; else (`in_place`) when the backward passes are
over. Replicas of a stage that take microbatches in turn may then sum in different backward passes, and no
backward pass may wait for another's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives import Group, Handle
from echelon.collectives.buffer_layout import BufferLayout
from echelon.parallel.data.buckets import (
    GradientKind,
    GradientMemory,
    NewMemory,
    PreallocatedMemory,
    UnitBucket,
)
from echelon.parallel.data.parameter_set import ShardGroups

_IN_FLIGHT = 1  # units whose whole gradients may be summed while another is produced


@final
class UnitGradient(UnitBucket):
    """The gradient of one unit: whole, of this rank's samples, and this rank's part of the sum over ranks."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, layout: BufferLayout, group: Group
    ) -> None:
        super().__init__(parameters, dtype, layout)
        self.kind = GradientKind(dtype, parameters[0].device)
        self.size, self.part_size, self._group = layout.size, layout.size // group.size, group
        self._part_memory: GradientMemory = NewMemory()
        self.part: Tensor | None = None
        self.has_part = False  # in this step

    def use_memory(self, gradients: GradientMemory, parts: GradientMemory) -> None:
        """From now on, take the memory of the whole gradient, and of parts that are added, from these."""
        self._memory, self._part_memory = gradients, parts

    def start_step(self, *, keeps_memory: bool) -> None:
        """Forget all gradients; the memory of the whole one stays, or is given back."""
        if keeps_memory:
            self.open()
        else:
            self.drop()
        self.has_part = False

    def adopt(self, gradient: Tensor) -> bool:
        """Make a whole gradient this rank's part, which it is where a single rank has the unit."""
        # Preallocated memory is needed for the next unit: a part may not stay there.
        if self._group.size > 1 or self.has_part or not isinstance(self._memory, NewMemory):
            return False
        self.part, self.has_part = gradient, True
        return True

    def new_part(self, *, in_place: bool) -> Tensor:
        """Return memory for this rank's part of a reduced gradient: kept memory for the first of a step."""
        if in_place:
            assert self.buffer is not None
            self.part = self.buffer.view(self._group.size, self.part_size)[self._group.rank]
            self.has_part = True
            return self.part
        if self.has_part:
            return self._part_memory.take(self.part_size, self.kind)
        if self.part is None:
            self.part = torch.empty(self.part_size, dtype=self.kind.dtype, device=self.kind.device)
        self.has_part = True
        return self.part

    def add_part(self, part: Tensor) -> None:
        """A reduced part is there: add it to that of the step, unless it went there directly."""
        assert self.part is not None
        if part is not self.part:
            self.part.add_(part)
        self.drop_part(part)

    def drop_part(self, part: Tensor) -> None:
        """A reduced part is of no more use; that of the step keeps its memory."""
        if part is not self.part:
            self._part_memory.give_back(part)

    def free_part(self) -> None:
        """The part was used: give its memory back."""
        self.part = None
        self.has_part = False

    def give_back(self, gradient: Tensor) -> None:
        """The memory of a whole gradient that was taken, when its sum has been waited for."""
        self._memory.give_back(gradient)

    def storages(self) -> list[Tensor]:
        return [tensor for tensor in (self.buffer, self.part) if tensor is not None]

    def preallocated(self) -> list[Tensor]:
        """Return the buffers that this unit's memory holds while no gradient is there."""
        return [*self._memory.storages(), *self._part_memory.storages()]


def preallocate(units: Sequence[UnitGradient]) -> None:
    """Let units take memory that fits any of them, whichever comes first (contiguous=true)."""
    wholes = PreallocatedMemory([(unit.size, unit.kind) for unit in units])
    parts = PreallocatedMemory([(unit.part_size, unit.kind) for unit in units], at_once=0)
    for unit in units:
        unit.use_memory(wholes, parts)


class _Scatter(NamedTuple):
    """A unit's gradient in its first sum: `part` will hold this rank's part of it."""

    handle: Handle | None  # None: the rank has all parts
    unit: UnitGradient
    gradient: Tensor | None  # whole; None where the unit keeps its memory
    part: Tensor
    last: bool  # of the step, for this unit

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()

    def free_gradient(self) -> None:
        """The sum has been waited for: nothing reads the whole gradient any more."""
        if self.gradient is not None:
            self.unit.give_back(self.gradient)


@final
class GradientSums:
    """The sums that are in flight. All ranks must begin them in the same order."""

    def __init__(
        self,
        groups: ShardGroups,
        *,
        in_place: bool,
        waits: bool = True,
        waits_for_second: bool = False,
        on_sum: Callable[[UnitGradient], None] | None = None,
    ) -> None:
        """`in_place`: a part stays in the memory of the whole gradient, which the unit keeps.
        `waits`: a backward pass may wait for first sums; `waits_for_second`: and for second ones.
        `on_sum`: is called for each unit whose sums are complete, to update it in the backward pass."""
        self._shard_group, self._copies_group = groups
        self._in_place, self._waits, self._on_sum = in_place, waits and not in_place, on_sum
        self._waits_for_second = waits_for_second
        self._scatters: deque[_Scatter] = deque()
        self._second_sums: deque[tuple[Handle, UnitGradient]] = deque()

    def start(self, unit: UnitGradient, *, last: bool, overlaps: bool = True) -> None:
        """The gradient of a unit is complete: begin to sum it. `last`: it gets no more in this step.
        `overlaps`: a backward pass goes on meanwhile."""
        gradient = unit.close() if self._in_place else unit.take()
        if not self._in_place and unit.adopt(gradient):
            self._scatters.append(_Scatter(None, unit, None, gradient, last))
        else:
            part = unit.new_part(in_place=self._in_place)
            handle = self._scatter(part, gradient, overlaps=overlaps)
            taken = None if self._in_place else gradient
            self._scatters.append(_Scatter(handle, unit, taken, part, last))
        if self._waits:  # a sum in place takes no memory
            self._finish_scatters(_IN_FLIGHT if self._shard_group.size > 1 else 0)
        if self._waits_for_second:
            self._finish_second_sums(_IN_FLIGHT)

    def _scatter(self, part: Tensor, gradient: Tensor, *, overlaps: bool) -> Handle | None:
        if self._in_place and self._shard_group.size == 1:
            return None  # the part is the gradient
        with self._shard_group.ledger.about("gradients"):
            return self._shard_group.reduce_scatter(part, gradient, wait=False, overlaps=overlaps)

    def complete(self) -> None:
        """Return when every unit has its part of the sum over all ranks."""
        self._finish_scatters(0)
        self._finish_second_sums(0)

    def storages(self) -> list[Tensor]:
        return [scatter.gradient for scatter in self._scatters if scatter.gradient is not None]

    def drop(self) -> None:
        """Wait for what a failed step has left in flight; its parts are of no use."""
        scatters, second_sums = list(self._scatters), list(self._second_sums)
        self._scatters.clear()
        self._second_sums.clear()
        with ExitStack() as stack:  # waits for all, the first one first, even if one raises
            for handle, _ in reversed(second_sums):
                stack.callback(handle.wait)
            for scatter in reversed(scatters):
                stack.callback(scatter.unit.drop_part, scatter.part)
                stack.callback(scatter.free_gradient)
                stack.callback(scatter.wait)

    def _finish_scatters(self, at_most: int) -> None:
        """Wait until `at_most` first sums are in flight; the second ones of the others begin."""
        while len(self._scatters) > at_most:
            scatter = self._scatters.popleft()
            scatter.wait()
            scatter.free_gradient()
            unit, part, last = scatter.unit, scatter.part, scatter.last
            del scatter  # the last reference to the whole gradient: its memory serves what comes next
            unit.add_part(part)
            if last:
                self._sum_over_copies(unit)

    def _finish_second_sums(self, at_most: int) -> None:
        while len(self._second_sums) > at_most:  # one that fails is not waited for again
            handle, unit = self._second_sums.popleft()
            handle.wait()
            self._use(unit)

    def _sum_over_copies(self, unit: UnitGradient) -> None:
        if self._copies_group.size == 1:
            self._use(unit)
            return
        assert unit.part is not None
        with self._copies_group.ledger.about("gradients"):
            handle = self._copies_group.all_reduce(unit.part, wait=False)
        self._second_sums.append((handle, unit))

    def _use(self, unit: UnitGradient) -> None:
        if self._on_sum is not None:
            self._on_sum(unit)
