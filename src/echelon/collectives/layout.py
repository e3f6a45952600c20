"""The layout: the position of every rank. Pure arithmetic over a plan; no process group, no torch.

Ranks are numbered with `pipeline` outermost and `tensor` innermost, so that tensor ranks, which communicate
the most, are neighbours on a host. `data=2 tensor=2 pipeline=2`:

    rank        0  1  2  3  4  5  6  7
    pipeline    0  0  0  0  1  1  1  1
    data        0  0  1  1  0  0  1  1
    tensor      0  1  0  1  0  1  0  1

A stage with more replicas than the others has a longer data axis. `pipeline=3-1`:

    rank        0  1  2  3
    pipeline    0  0  0  1
    data        0  1  2  0

Experts are spread over neighbouring data ranks: the ranks along `expert` hold different experts, those along
`expert_data` the same ones, and so do those along `experts`, at all positions along `context`.

The ranks that hold the same weights (along `data` and `context`) are cells of their stage, numbered in rank
order. Hybrid sharding divides them into groups of neighbours: the ranks along `shard` hold different parts of
one copy of what is sharded, those along `copies` the same part of different copies. `data=4 shard=2`:

    rank        0  1  2  3
    part        0  1  0  1
    copy        0  0  1  1
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from echelon.plan import Plan

AXES = ("pipeline", "data", "context", "tensor")
# Each is several axes in one, or what `shard=` of the plan makes of them.
COMBINED_AXES = ("weights", "stage", "all", "shard", "copies")
# The same for the weights of experts: the ranks with the same experts, and how they divide a copy of them.
EXPERT_AXES = ("experts", "expert_shard", "expert_copies")

# Ranks are in the same group along an axis when these coordinates are equal.
_EQUAL_COORDINATES = {
    "all": (),
    "stage": ("pipeline",),  # the ranks that hold parts of the same stages
    "weights": ("pipeline", "tensor"),  # the ranks with the same weights: data and context together
    "shard": ("pipeline", "copy", "tensor"),  # the ranks with different parts of one copy of the weights
    "copies": ("pipeline", "part", "tensor"),  # the ranks with the same part
    "pipeline": ("replica", "context", "tensor"),
    "data": ("pipeline", "context", "tensor"),
    "context": ("pipeline", "data", "tensor"),
    "tensor": ("pipeline", "data", "context"),
    "expert": ("pipeline", "expert_data", "context", "tensor"),
    "expert_data": ("pipeline", "expert", "context", "tensor"),
    "experts": ("pipeline", "expert", "tensor"),  # the ranks with the same experts, at any context
    "expert_shard": ("pipeline", "expert", "copy", "tensor"),
    "expert_copies": ("pipeline", "expert", "expert_part", "tensor"),
}


class Position(NamedTuple):
    """The coordinates of a rank along every axis. `replica` counts copies of the whole pipeline, `part` and
    `copy` say what of its stage the rank holds if that is sharded."""

    pipeline: int
    data: int
    context: int
    tensor: int
    replica: int
    expert: int
    expert_data: int
    part: int
    copy: int
    expert_part: int  # the same as `part`, of experts: among the ranks of a copy with the same ones


class Extent(NamedTuple):
    """The ranks of a group: in each of its stages all combinations of these coordinates."""

    stages: range
    cells: tuple[Sequence[int], ...]  # in each of the stages
    tensor: range

    def same(self, other: "Extent") -> bool:
        if (self.stages, self.tensor) != (other.stages, other.tensor):
            return False
        return all(map(_same_cells, self.cells, other.cells))


@dataclass(frozen=True)
class Layout:
    """The position of each rank of a plan, and its groups. A question about one rank visits no other."""

    plan: Plan

    def position(self, rank: int) -> Position:
        plan = self.plan
        stage = bisect_right(self._first_ranks, rank) - 1
        cell, tensor = divmod(rank - self._first_ranks[stage], plan.tensor)
        data, context = divmod(cell, plan.context)
        replicas = plan.replicas[stage]
        replica, expert, expert_data = data // replicas, data % plan.expert, data // plan.expert
        copy, part = divmod(cell, self._shard_size(replicas))
        expert_part = self._expert_part(cell, part)
        return Position(stage, data, context, tensor, replica, expert, expert_data, part, copy, expert_part)

    def _expert_part(self, cell: int, part: int) -> int:
        """Return how many ranks with the same experts come before this one in its copy."""
        expert = self._expert(cell)
        return self._num_before(cell, expert) - self._num_before(cell - part, expert)

    def _num_before(self, cell: int, expert: int) -> int:
        """Return how many of the cells before this one hold these experts."""
        contexts = self.plan.context
        rounds, rest = divmod(cell, contexts * self.plan.expert)
        return rounds * contexts + min(max(rest - expert * contexts, 0), contexts)

    def _expert(self, cell: int) -> int:
        return cell // self.plan.context % self.plan.expert

    @property
    def positions(self) -> Iterator[Position]:
        return map(self.position, range(self.plan.ranks))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks along `axis`; each rank is in exactly one of them."""
        groups: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for rank in range(self.plan.ranks):
            if rank not in seen:
                groups.append(self.group(axis, rank))
                seen.update(groups[-1])
        return tuple(groups)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks along `axis` through `rank`, in order."""
        extent, plan = self._extent(axis, self.position(rank)), self.plan
        return tuple(
            self._first_ranks[stage] + cell * plan.tensor + tensor
            for stage, cells in zip(extent.stages, extent.cells, strict=True)
            for cell in cells
            for tensor in extent.tensor
        )

    def place(self, axis: str, rank: int) -> tuple[int, int]:
        """Return the number of `rank` within its group along `axis`, and the size of that group."""
        position = self.position(rank)
        extent = self._extent(axis, position)
        before = extent.stages.index(position.pipeline)
        cell = position.data * self.plan.context + position.context
        cells = sum(map(len, extent.cells[:before])) + extent.cells[before].index(cell)
        number = cells * len(extent.tensor) + extent.tensor.index(position.tensor)
        return number, sum(map(len, extent.cells)) * len(extent.tensor)

    def largest_group(self, axis: str) -> int:
        return max(self.place(axis, first)[1] for first in self._first_ranks)

    def column(self, rank: int, stages: Collection[int]) -> tuple[int, ...]:
        """Return the ranks of `stages` in the pipeline of `rank`, in order. Where all stages have as many
        replicas, those with the same number along `data`."""
        own, is_grid = self.position(rank), self.even
        positions = ((other, self.position(other)) for other in self.group("pipeline", rank))
        return tuple(
            other
            for other, position in positions
            if position.pipeline in stages and (position.data == own.data or not is_grid)
        )

    def columns(self, stages: Collection[int]) -> tuple[tuple[int, ...], ...]:
        """Return all columns of `stages`; each rank of these stages is in exactly one of them."""
        first_stage = self.group("stage", self._first_ranks[min(stages)])
        return tuple(dict.fromkeys(self.column(rank, stages) for rank in first_stage))

    def same_groups(self, axis: str, other: str) -> bool:
        """Return whether the groups along two axes are the same. The groups of one stage have one shape, so
        its first rank answers for all."""
        firsts = [self.position(rank) for rank in self._first_ranks]
        return all(self._extent(axis, first).same(self._extent(other, first)) for first in firsts)

    @property
    def even(self) -> bool:
        """Return whether every stage has the same number of ranks, so that the layout is a grid."""
        return len(set(self.plan.replicas)) == 1

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        plan = self.plan
        sizes = [replicas * plan.data * plan.context * plan.tensor for replicas in plan.replicas]
        return tuple(accumulate(sizes[:-1], initial=0))

    def _extent(self, axis: str, position: Position) -> Extent:
        plan, equal = self.plan, _EQUAL_COORDINATES[axis]
        stages = _along(range(plan.stages), position.pipeline, fixed="pipeline" in equal)
        cells = tuple(self._cells(equal, position, plan.replicas[stage]) for stage in stages)
        tensor = _along(range(plan.tensor), position.tensor, fixed="tensor" in equal)
        return Extent(stages, cells, tensor)

    def _cells(self, equal: Collection[str], position: Position, replicas: int) -> Sequence[int]:
        """Return the cells of a stage with so many replicas whose `equal` coordinates are `position`'s."""
        size, contexts = self._shard_size(replicas), self.plan.context
        everyone = range(replicas * self.plan.data * contexts)
        if "expert" in equal and "context" not in equal:
            return tuple(self._expert_cells(equal, position, everyone, size))
        if "copy" in equal:
            return everyone[position.copy * size : (position.copy + 1) * size]
        if "part" in equal:
            return everyone[position.part :: size]
        data = self._data_ranks(equal, position, replicas)
        begin, end = data.start * contexts, data.stop * contexts
        if "context" in equal:
            return everyone[begin + position.context : end : data.step * contexts]
        return everyone[begin:end]  # all data ranks, or one

    def _expert_cells(
        self, equal: Collection[str], position: Position, everyone: range, size: int
    ) -> Iterator[int]:
        """Yield the cells with the experts of `position`, of all contexts; of its copy, or with its part."""
        by_part, begin = "expert_part" in equal, position.copy * size
        for cell in everyone[begin : begin + size] if "copy" in equal else everyone:
            part = self._expert_part(cell, cell % size) if by_part else position.expert_part
            if self._expert(cell) == position.expert and part == position.expert_part:
                yield cell

    def _shard_size(self, replicas: int) -> int:
        """Return how many ranks share one copy of a stage that has so many replicas."""
        return self.plan.shard or replicas * self.plan.data * self.plan.context

    def _data_ranks(self, equal: Collection[str], position: Position, replicas: int) -> range:
        """Return the data coordinates of such ranks, as `_cells` does."""
        everyone, experts = range(replicas * self.plan.data), self.plan.expert
        if "data" in equal:
            return _along(everyone, position.data, fixed=True)
        if "replica" in equal:
            return everyone[position.replica * replicas : (position.replica + 1) * replicas]
        if "expert_data" in equal:
            return everyone[position.expert_data * experts : (position.expert_data + 1) * experts]
        return everyone[position.expert :: experts] if "expert" in equal else everyone


def _same_cells(ours: Sequence[int], theirs: Sequence[int]) -> bool:
    if isinstance(ours, range) and isinstance(theirs, range):  # whatever their length, at once
        return ours == theirs
    return len(ours) == len(theirs) and tuple(ours) == tuple(theirs)


def _along(coordinates: range, own: int, *, fixed: bool) -> range:
    return coordinates[own : own + 1] if fixed else coordinates
