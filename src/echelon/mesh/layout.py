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
`expert_data` the same ones.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from echelon.plan import Plan

AXES = ("pipeline", "data", "context", "tensor")
COMBINED_AXES = ("weights", "stage", "all")  # each is several axes in one

# Ranks are in the same group along an axis when these coordinates are equal.
_EQUAL_COORDINATES = {
    "all": (),
    "stage": ("pipeline",),  # the ranks that hold parts of the same stages
    "weights": ("pipeline", "tensor"),  # the ranks with the same weights: data and context together
    "pipeline": ("replica", "context", "tensor"),
    "data": ("pipeline", "context", "tensor"),
    "context": ("pipeline", "data", "tensor"),
    "tensor": ("pipeline", "data", "context"),
    "expert": ("pipeline", "expert_data", "context", "tensor"),
    "expert_data": ("pipeline", "expert", "context", "tensor"),
}


class Position(NamedTuple):
    """The coordinates of a rank along every axis. `replica` counts copies of the whole pipeline."""

    pipeline: int
    data: int
    context: int
    tensor: int
    replica: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class Layout:
    """The positions of all ranks of a plan, and their groups."""

    plan: Plan

    @cached_property
    def positions(self) -> tuple[Position, ...]:
        """The position of each rank, in rank order."""
        plan = self.plan
        return tuple(
            Position(stage, data, context, tensor, data // replicas, data % plan.expert, data // plan.expert)
            for stage, replicas in enumerate(plan.replicas)
            for data in range(replicas * plan.data)
            for context in range(plan.context)
            for tensor in range(plan.tensor)
        )

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks along `axis`; each rank is in exactly one of them."""
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, position in enumerate(self.positions):
            key = tuple(getattr(position, name) for name in _EQUAL_COORDINATES[axis])
            members.setdefault(key, []).append(rank)
        return tuple(tuple(ranks) for ranks in members.values())

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks along `axis` through `rank`, in order."""
        return next(ranks for ranks in self.groups(axis) if rank in ranks)

    @property
    def even(self) -> bool:
        """Whether every stage has the same number of ranks, so that the layout is a grid."""
        return len(set(self.plan.replicas)) == 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Ranks along pipeline, data, context and tensor, of an even layout."""
        plan = self.plan
        assert self.even
        return plan.stages, plan.replicas[0] * plan.data, plan.context, plan.tensor
