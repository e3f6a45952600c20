"""The mesh: this process's place in a layout, and its groups along each axis, over torch's process groups.

An even layout is a torch DeviceMesh, so that anything in torch that wants one can have it. A layout whose
stages have different replicas is no grid; its groups are made one by one.
"""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from echelon.collectives import Group, Ledger, RecordingGroup, group_over
from echelon.errors import UserError
from echelon.launching import join
from echelon.mesh.layout import AXES, TOGETHER, Layout, Position
from echelon.plan import Plan


class Mesh:
    """Where this process stands in `plan`, with a Group for each axis, all writing into one ledger."""

    def __init__(self, plan: Plan, groups: dict[str, Group], rank: int, device: torch.device) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.layout = Layout(plan)
        self.ledger = next(iter(groups.values())).ledger
        self.back = groups.pop("back", groups["pipeline"])  # the same ranks; for messages to lower ones
        self._groups = groups

    @classmethod
    def join(cls, plan: Plan) -> "Mesh":
        """Join the ranks that are there: launched, under torchrun, or this process alone."""
        join()
        there = dist.get_world_size() if dist.is_initialized() else 1
        if there != plan.ranks:
            raise UserError(
                f"plan '{plan}' takes {plan.ranks} ranks, and {there} are here; start it with "
                f"echelon.launch(fn, ranks={plan.ranks}) or torchrun --nproc-per-node {plan.ranks}"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        return cls(plan, _real_groups(Layout(plan), rank), rank, this_device())

    @classmethod
    def pretend(cls, plan: Plan, rank: int) -> "Mesh":
        """Rank `rank` of a plan of any size, in this one process: everything is recorded, nothing moved."""
        layout, ledger = Layout(plan), Ledger()
        groups: dict[str, Group] = {}
        for axis in _axes_of(layout):
            ranks = layout.group(axis, rank)
            groups[axis] = RecordingGroup(axis, ranks.index(rank), len(ranks), ledger)
        return cls(plan, groups, rank, torch.device("cpu"))

    @property
    def position(self) -> Position:
        return self.layout.positions[self.rank]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def group(self, axis: str) -> Group:
        """This rank's group along `axis`: one of the plan's, or `weights` (the ranks with the same weights),
        `stage` (with a part in the same stages), `all`."""
        return self._groups[_alias(self.layout, axis)]

    def among(self, stages: Collection[int]) -> Group:
        """The ranks of this rank's pipeline that are in one of `stages`; every rank must call this.

        Where all stages have as many replicas, those of the same number along `data`.
        """
        columns: dict[tuple[int, ...], list[int]] = {}
        for rank, its in enumerate(self.layout.positions):
            if its.pipeline in stages:
                place = (its.data if self.layout.even else its.replica, its.context, its.tensor)
                columns.setdefault(place, []).append(rank)
        groups = tuple(tuple(ranks) for ranks in columns.values())
        made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
        mine = next((ranks for ranks in groups if self.rank in ranks), None)
        if mine is None:
            return RecordingGroup("tied", ledger=self.ledger)
        return group_over("tied", made[mine], self.ledger)


def _axes_of(layout: Layout) -> tuple[str, ...]:
    together = tuple(axis for axis in TOGETHER if _alias(layout, axis) == axis)
    return (*AXES, *together, *(("expert", "expert_data") if layout.plan.expert > 1 else ()))


def _alias(layout: Layout, axis: str) -> str:
    """The first axis with the same groups: several together are often just one."""
    if axis not in TOGETHER:
        return axis
    return next(each for each in (*_BY_CUSTOM, *TOGETHER) if layout.groups(each) == layout.groups(axis))


_BY_CUSTOM = ("data", "context", "tensor", "pipeline")  # all alone, one is named by data


def _grid_axes(layout: Layout) -> tuple[str, ...]:
    """The axes whose groups are lines of the grid: replicas of a stage share one pipeline."""
    return AXES if set(layout.plan.replicas) == {1} else AXES[1:]


def _real_groups(layout: Layout, rank: int) -> dict[str, Group]:
    ledger = Ledger()
    grid = _device_mesh(layout) if layout.even and layout.plan.ranks > 1 else None
    groups: dict[str, Group] = {}
    for axis in _axes_of(layout):
        sizes = {len(ranks) for ranks in layout.groups(axis)}
        if sizes == {1}:
            groups[axis] = RecordingGroup(axis, ledger=ledger)
        elif grid is not None and axis in _grid_axes(layout):
            groups[axis] = group_over(axis, grid.get_group(axis), ledger)
        else:
            groups[axis] = group_over(axis, _new_group(layout.groups(axis), rank), ledger)
    if layout.plan.stages > 1 and dist.get_backend() == "nccl":  # where a pair of ranks has one queue
        groups["back"] = group_over("pipeline", _new_group(layout.groups("pipeline"), rank), ledger)
    return groups


def _device_mesh(layout: Layout) -> DeviceMesh:
    """The grid over the axes that have more than one rank: an axis of one needs no process group."""
    axes = [(axis, size) for axis, size in zip(AXES, layout.shape, strict=True) if size > 1]
    ranks = torch.arange(layout.plan.ranks).reshape([size for _, size in axes])
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return DeviceMesh(kind, ranks, mesh_dim_names=tuple(axis for axis, _ in axes))


def _new_group(groups: tuple[tuple[int, ...], ...], rank: int) -> dist.ProcessGroup:
    # Every process makes every group, in the same order: that is how torch agrees on them.
    made: dict[tuple[int, ...], dist.ProcessGroup] = {ranks: dist.new_group(list(ranks)) for ranks in groups}
    mine = next(ranks for ranks in groups if rank in ranks)
    return made[mine]


def this_device() -> torch.device:
    """Where this process computes."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
