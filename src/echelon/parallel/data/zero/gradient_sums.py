"""Gradients of units on their way to the ranks that hold the parts: two sums, one after the other.

    reduce-scatter along `shard`    of the whole gradient: each rank that shards a copy gets its part
    all-reduce along `copies`       of that part, over the ranks that hold the same one of other copies

Where there is one copy, the first sum is all. The second one is made once per step: the parts of earlier
microbatches only add up. It begins when the first is complete: while the backward pass goes on, where that
waits for first sums to bound the memory of whole gradients; else (`in_place`) when the backward passes are
over. Replicas of a stage that take microbatches in turn may then sum in different backward passes, and no
backward pass may wait for another's.

Where units are updated in the backward pass, `on_sum` hears of each unit whose sums are complete.
"""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple, final

from torch import Tensor

from echelon.collectives import Handle
from echelon.parallel.data.parameter_set import ShardGroups
from echelon.parallel.data.zero.flat import FlatUnit

_IN_FLIGHT = 1  # units whose whole gradients may be on the way while another is produced


class _Scatter(NamedTuple):
    """A unit's gradient in its first sum: `part` will hold this rank's part of it."""

    handle: Handle | None  # None: nobody has another part
    unit: FlatUnit
    gradient: Tensor | None  # whole; None where the unit keeps its memory
    part: Tensor
    last: bool  # of the step, for this unit

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()

    def free_gradient(self) -> None:
        """The sum has been waited for: nobody reads the whole gradient any more."""
        if self.gradient is not None:
            self.unit.memory.gradients.give_back(self.gradient)


@final
class GradientSums:
    """The sums that are on the way. All ranks must begin them in the same order."""

    def __init__(
        self,
        groups: ShardGroups,
        *,
        in_place: bool,
        waits: bool = True,
        waits_for_second: bool = False,
        on_sum: Callable[[FlatUnit], None] | None = None,
    ) -> None:
        """`in_place`: a part stays in the memory of the whole gradient, which the unit keeps.
        `waits`: a backward pass may wait for first sums; `waits_for_second`: and for second ones."""
        self._shard_group, self._copies_group = groups
        self._in_place, self._waits, self._on_sum = in_place, waits and not in_place, on_sum
        self._waits_for_second = waits_for_second
        self._scatters: deque[_Scatter] = deque()
        self._second_sums: deque[tuple[Handle, FlatUnit]] = deque()

    def start(self, unit: FlatUnit, *, last: bool) -> None:
        """The gradient of a unit is complete: begin to sum it. `last`: it gets no more in this step."""
        gradient = unit.close_gradient() if self._in_place else unit.take_gradient()
        if not self._in_place and unit.adopt(gradient):
            self._scatters.append(_Scatter(None, unit, None, gradient, last))
        else:
            part = unit.new_part(in_place=self._in_place)
            handle = self._scatter(part, gradient)
            taken = None if self._in_place else gradient
            self._scatters.append(_Scatter(handle, unit, taken, part, last))
        if self._waits:  # a sum in place takes no memory
            self._finish_scatters(_IN_FLIGHT if self._shard_group.size > 1 else 0)
        if self._waits_for_second:
            self._finish_second_sums(_IN_FLIGHT)

    def _scatter(self, part: Tensor, gradient: Tensor) -> Handle | None:
        if self._in_place and self._shard_group.size == 1:
            return None  # the part is the gradient
        with self._shard_group.ledger.about("gradients"):
            return self._shard_group.reduce_scatter(part, gradient, wait=False)

    def complete(self) -> None:
        """Return when every unit has its part of the sum over all ranks."""
        self._finish_scatters(0)
        self._finish_second_sums(0)

    def storages(self) -> list[Tensor]:
        """Whole gradients on their way."""
        return [scatter.gradient for scatter in self._scatters if scatter.gradient is not None]

    def drop(self) -> None:
        """Wait for what a failed step has left on the way; its parts are of no use."""
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
        """Wait until `at_most` first sums are on the way; the second ones of the others begin."""
        while len(self._scatters) > at_most:
            scatter = self._scatters.popleft()
            scatter.wait()
            scatter.free_gradient()
            unit, part, last = scatter.unit, scatter.part, scatter.last
            del scatter  # and with it the whole gradient
            unit.add_part(part)
            if last:
                self._sum_over_copies(unit)

    def _finish_second_sums(self, at_most: int) -> None:
        while len(self._second_sums) > at_most:  # one that fails is not waited for again
            handle, unit = self._second_sums.popleft()
            handle.wait()
            self._tell(unit)

    def _sum_over_copies(self, unit: FlatUnit) -> None:
        if self._copies_group.size == 1:
            self._tell(unit)
            return
        assert unit.part is not None
        with self._copies_group.ledger.about("gradients"):
            handle = self._copies_group.all_reduce(unit.part, wait=False)
        self._second_sums.append((handle, unit))

    def _tell(self, unit: FlatUnit) -> None:
        if self._on_sum is not None:
            self._on_sum(unit)
