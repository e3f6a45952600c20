"""The mesh: this process's position in a layout, and its groups along each axis, over process groups."""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Optional, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not marked so
from torch.distributed import distributed_c10d as c10d

from echelon.collectives.boundary import HostBoundary, make_boundary
from echelon.collectives.comparison import CallComparison
from echelon.collectives.group import Group, Handle
from echelon.collectives.layout import AXES, COMBINED_AXES, EXPERT_AXES, Layout, Position
from echelon.collectives.ledger import Ledger
from echelon.collectives.process_groups import (
    check_streams,
    new_host_group,
    new_process_group,
    without_serialization_warning,
)
from echelon.collectives.recording_group import RecordingGroup
from echelon.collectives.shared.group import group_over
from echelon.collectives.torch_group import TorchGroup
from echelon.errors import UserError
from echelon.hardware import available_memory
from echelon.launching import join
from echelon.launching.group import backend_for, operation_limit
from echelon.plan import Plan

__all__ = ["Edge", "Edges", "Layout", "Mesh", "Position", "this_device"]


class Edge(NamedTuple):
    """One direction between this rank and another, with a queue of its own.

    NCCL runs all unbatched operations of one communicator in one order, over all peers: a receive that waits
    for rank r−1 would hold up the send to rank r+1, on which rank r−1 may be waiting. So there each edge has
    a communicator of two ranks. Gloo and shared memory keep pairs apart: one group serves all edges.
    """

    group: Group
    peer: int  # the other rank, as `group` numbers it
    # For bytes of the host; None where the host reads what it receives here.
    host: Optional["Edge"] = None

    def send(self, memory: Tensor, subject: str) -> Handle:
        with self.group.ledger.about(subject):
            return self.group.send(memory, self.peer, wait=False)

    def recv(self, memory: Tensor, subject: str) -> Handle:
        with self.group.ledger.about(subject):
            return self.group.recv(memory, self.peer, wait=False)


class Edges(NamedTuple):
    """The edges of one rank, by the rank at the other end."""

    outgoing: dict[int, Edge]
    incoming: dict[int, Edge]


def disjoint_pairs(pairs: Collection[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return the pairs, in as few sets as a simple rule finds in which no rank appears twice."""
    sets: list[list[tuple[int, int]]] = []
    for pair in sorted(pairs):
        fitting = (each for each in sets if not any(set(pair) & set(other) for other in each))
        first = next(fitting, None)
        if first is None:
            sets.append([pair])
        else:
            first.append(pair)
    return sets


def edges_over(group: Group, device: torch.device) -> Edges:
    """Return the edges of a group that keeps pairs of ranks apart, for tensors on `device`."""
    others = [rank for rank in range(group.size) if rank != group.rank]
    host = device.type == "cpu"
    edges = {peer: Edge(group, peer, None if host else Edge(group, peer)) for peer in others}
    return Edges(edges, edges)


class Mesh:
    """This process's position in `plan`, with a Group for each axis, all writing into one ledger."""

    def __init__(self, plan: Plan, groups: dict[str, Group], rank: int, device: torch.device) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.layout = Layout(plan)
        self.ledger = next(iter(groups.values())).ledger
        self._open_groups = list(groups.values())
        self._groups = groups
        self._boundary: HostBoundary | None = None
        for group in groups.values():
            self._let_compare(group)
        self._equal_axes = {axis: _first_equal_axis(self.layout, axis) for axis in _combined(self.layout)}

    @classmethod
    def join(cls, plan: Plan) -> "Mesh":
        """Join the running ranks (launched, under torchrun, or this process alone), or pretend to."""
        if (pretended := _pretended.get()) is not None:
            return pretended(plan)
        join()
        running = dist.get_world_size() if dist.is_initialized() else 1
        if running != plan.ranks:
            raise UserError(
                f"plan '{plan}' needs {plan.ranks} ranks, but {running} {'is' if running == 1 else 'are'} "
                f"running; start it with echelon.launch(fn, ranks={plan.ranks}) or "
                f"torchrun --nproc-per-node {plan.ranks}"
            )
        rank = dist.get_rank() if dist.is_initialized() else 0
        device = this_device()
        return cls(plan, _real_groups(Layout(plan), rank, device), rank, device)

    @classmethod
    def pretend(cls, plan: Plan, rank: int) -> Self:
        """Rank `rank` of a plan of any size, in this one process: everything is recorded, nothing moved."""
        layout, ledger = Layout(plan), Ledger()
        groups: dict[str, Group] = {}
        for axis in _axes_of(layout):
            groups[axis] = cls.pretended_group(axis, *layout.place(axis, rank), ledger)
        return cls(plan, groups, rank, torch.device("cpu"))

    @classmethod
    def pretended_group(cls, axis: str, number: int, size: int, ledger: Ledger) -> Group:
        """Return a group of a mesh that is pretended."""
        return RecordingGroup(axis, number, size, ledger)

    @property
    def position(self) -> Position:
        return self.layout.position(self.rank)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self._groups)

    def group(self, axis: str) -> Group:
        """Return this rank's group along `axis`: one of the plan's, `weights` (ranks with the same weights),
        `shard` (those that shard one copy of them), `copies` (those with the same part of other copies),
        `stage` (the ranks with parts of the same stages), `all`. With expert > 1 also `experts`,
        `expert_shard` and `expert_copies`: what `weights`, `shard` and `copies` are for experts."""
        return self._groups[self._equal_axes.get(axis, axis)]

    @property
    def boundary(self) -> HostBoundary:
        """Return the boundary between this rank's device and its host, which this mesh makes and closes."""
        if self._boundary is None:
            self._boundary = make_boundary(self.device, self.ledger)
        return self._boundary

    def free_host_memory(self) -> int | None:
        """Return how many bytes of memory this rank's machine has left, if it tells."""
        return available_memory()

    def host_storages(self) -> dict[str, list[Tensor]]:
        """Return what is held in host memory now, by category; asks for no boundary."""
        return {} if self._boundary is None else self._boundary.storages()

    def group_of_stages(self, stages: Collection[int]) -> Group:
        """Open a group of this pipeline's ranks that are in one of `stages`; every rank must call this. Where
        all stages have as many replicas, those with the same number along `data`."""
        column = self.layout.column(self.rank, stages)
        process_group = new_process_group(column, partial(self.layout.columns, stages))
        if process_group is None:
            return RecordingGroup("tied", ledger=self.ledger)
        group = self._keep_open(_group_over("tied", process_group, self.ledger))
        group.connect(self.device)
        return group

    def edges(self, pairs: Collection[tuple[int, int]]) -> Edges:
        """Return the edges between this rank and others of its pipeline; every rank must call this. `pairs`
        (sender, receiver) are all that the program uses, as the pipeline numbers its ranks."""
        group = self.group("pipeline")
        if group.size == 1 or group.has_queue_per_peer(self.device):
            return edges_over(group, self.device)
        check_streams(self.plan, self._open_groups, pairs, group, self.group("all"), self.device)
        host = self._open_host_group()
        edges = Edges({}, {})
        for directed in disjoint_pairs(pairs):
            sender, receiver = next((pair for pair in directed if group.rank in pair), directed[0])
            edge_group = self._open_edge_group((sender, receiver), directed)
            if edge_group is None:
                continue
            edge_group.connect(self.device)
            outgoing = group.rank == sender
            peer = receiver if outgoing else sender
            edge = Edge(edge_group, 1 - edge_group.rank, Edge(host, peer))
            (edges.outgoing if outgoing else edges.incoming)[peer] = edge
        return edges

    def _open_host_group(self) -> Group:
        """Open a group of this rank's pipeline, for bytes of the host; this mesh closes it."""
        process_group = new_host_group(self.layout.group("pipeline", self.rank))
        return self._keep_open(TorchGroup("pipeline", process_group, self.ledger))

    def _open_edge_group(self, pair: tuple[int, int], pairs: Collection[tuple[int, int]]) -> Group | None:
        """Two ranks of this rank's pipeline, which this mesh closes; None if it is neither of them. At the
        same time every pipeline opens a group for each of the `pairs`."""
        column = self.layout.group("pipeline", self.rank)
        with without_serialization_warning():
            process_group = new_process_group(
                _ranks_of_pair(column, pair),
                lambda: [_ranks_of_pair(each, p) for each in self.layout.groups("pipeline") for p in pairs],
            )
        if process_group is None:
            return None
        return self._keep_open(TorchGroup("pipeline", process_group, self.ledger))

    def _keep_open(self, group: Group) -> Group:
        """This mesh closes the group."""
        self._open_groups.append(group)
        self._let_compare(group)
        return group

    def _let_compare(self, group: Group) -> None:
        """With debug=true. Not where stages have several replicas: there a sum that is begun early does
        not wait, and a comparison would wait for a replica that waits for this rank."""
        if self.plan.debug and max(self.plan.replicas) == 1:
            compare_calls(group)

    def close(self, *, failed: bool = False) -> None:
        """Close all groups of this mesh, any number of times, also when peers are gone (`failed`). Without
        this, its threads, sockets and shared memory stay: torch keeps process groups in a table."""
        with ExitStack() as stack:  # closes the others even if one raises
            if self._boundary is not None:
                stack.callback(self._boundary.close)
                self._boundary = None
            while self._open_groups:
                stack.callback(self._open_groups.pop().close, failed=failed)


# The mesh that `Mesh.join` returns instead of one over the running ranks.
_pretended: ContextVar[Callable[[Plan], Mesh] | None] = ContextVar("pretended", default=None)


@contextmanager
def pretending(make: Callable[[Plan], Mesh]) -> Iterator[None]:
    """Let `Mesh.join` return what `make` makes of the plan; `this_device` is the CPU."""
    token = _pretended.set(make)
    try:
        yield
    finally:
        _pretended.reset(token)


def _axes_of(layout: Layout) -> tuple[str, ...]:
    combined = tuple(axis for axis in _combined(layout) if _first_equal_axis(layout, axis) == axis)
    return (*AXES, *combined, *(("expert",) if layout.plan.expert > 1 else ()))


def _combined(layout: Layout) -> tuple[str, ...]:
    return (*COMBINED_AXES, *(("expert_data", *EXPERT_AXES) if layout.plan.expert > 1 else ()))


def _first_equal_axis(layout: Layout, axis: str) -> str:
    """Return the first axis with the same groups: a combined axis often equals a single one."""
    candidates = (*_PREFERRED_AXES, *_combined(layout))
    return next(other for other in candidates if layout.same_groups(other, axis))


_PREFERRED_AXES = ("data", "context", "tensor", "pipeline")  # a single rank is a group along `data`


def _real_groups(layout: Layout, rank: int, device: torch.device) -> dict[str, Group]:
    """Return this rank's group along each axis, connected: in the same order on every rank."""
    ledger = Ledger()
    with ExitStack() as stack:  # closes what was made if a later group fails
        groups: dict[str, Group] = {}
        for axis in _axes_of(layout):
            groups[axis] = _real_group(axis, layout, rank, ledger)
            stack.callback(groups[axis].close)
            groups[axis].connect(device)
        stack.pop_all()
    return groups


def _real_group(axis: str, layout: Layout, rank: int, ledger: Ledger) -> Group:
    if layout.largest_group(axis) == 1:  # no rank makes a group
        return RecordingGroup(axis, ledger=ledger)
    process_group = new_process_group(layout.group(axis, rank), partial(layout.groups, axis))
    if process_group is None:  # along this axis the rank is alone, and others are not: pipeline=3-1
        return RecordingGroup(axis, ledger=ledger)
    return _group_over(axis, process_group, ledger)


def _group_over(axis: str, process_group: dist.ProcessGroup, ledger: Ledger) -> Group:
    """Return the Group over a new process group; if it cannot be made, torch drops the process group."""
    try:
        return group_over(axis, process_group, ledger)
    except BaseException:
        dist.destroy_process_group(process_group)
        raise


def _ranks_of_pair(column: Sequence[int], pair: tuple[int, int]) -> list[int]:
    """Return the ranks that a pipeline, `column`, gives the numbers of `pair`."""
    return [column[number] for number in pair]


def this_device() -> torch.device:
    """Return the device on which this process computes: the current GPU, if its group moves GPU tensors."""
    if _pretended.get() is not None:
        return torch.device("cpu")
    if torch.cuda.is_available() and (not dist.is_initialized() or backend_for("cuda") is not None):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# debug=true: lets the groups of a mesh compare what their ranks call.

_DEFAULT_LIMIT = timedelta(minutes=30)

# A connection to the store of each world: its main thread waits there for what others call.
_stores: "weakref.WeakKeyDictionary[dist.ProcessGroup, Store]" = weakref.WeakKeyDictionary()


def compare_calls(group: Group) -> None:
    """Let `group` compare its calls from here on, if it talks to processes; all its ranks must call this."""
    process_group: dist.ProcessGroup | None = getattr(group, "process_group", None)
    if process_group is None:
        return
    store = PrefixStore(f"echelon/debug/{process_group.group_name}", _store())
    ranks = dist.get_process_group_ranks(process_group)
    group.comparison = CallComparison(store, group.rank, ranks)


def _store() -> Store:
    world = dist.group.WORLD
    assert world is not None
    if world not in _stores:
        store = c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(operation_limit() or _DEFAULT_LIMIT)
        _stores[world] = store
    return _stores[world]
