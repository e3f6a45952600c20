"""Process groups of torch: all groups along an axis with one creation per rank, that of its own group.

`torch.distributed.new_group` makes a single group, and every rank must call it for every group there is: the
start of a training would take longer the more ranks it has. Here a group has a name that its members know
without the others: torch's number of the creation, which rises on every rank, and the group's first rank.

[Note: splits] If the world is bound to a device, NCCL splits a new communicator from that of the world. A
split is an operation of all ranks: each one names a colour, and those with the same one get a communicator
together. A rank in no group, or alone in its own, takes part without a colour. torch takes the colour from a
hash of the group's ranks, which can be the same for two groups. These two are made in splits of their own.
`data=3 tensor=2` where the second group and the third have the same colour:

    rank             0  1  2  3  4  5
    first split      5  5  8  8  -  -
    second split     -  -  -  -  8  8
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from echelon.collectives.group import Group
from echelon.collectives.recording_group import RecordingGroup
from echelon.errors import raise_errors
from echelon.launching.group import backend_for, operation_limit, this_world
from echelon.plan import Plan

Groups = Iterable[Sequence[int]]


def new_process_group(ranks: Sequence[int], all_groups: Callable[[], Groups]) -> dist.ProcessGroup | None:
    """Make the process group of `ranks` over the world's backend; return None unless it has this rank and
    another one.

    Every rank must call this, each with its own `ranks`; the groups have no rank in common. `all_groups`
    returns all of them, in the same order on every rank. Only a split asks for them.
    """
    name = _new_name(ranks)
    # NCCL's backend of the world, if new groups are split from it; None if each one connects.
    is_split = this_world().bound_device_id is not None and backend_for("cuda") == "nccl"
    source: Any | None = c10d._get_split_source(this_world()) if is_split else None
    is_member = len(ranks) > 1 and dist.get_rank() in ranks
    if source is None:
        return _create(ranks, name) if is_member else None
    own_split, num_splits = _find_split(ranks, all_groups())
    process_group = None
    for number in range(num_splits):
        if number == own_split and is_member:
            process_group = _create(ranks, name)
        else:
            source.perform_nocolor_split(this_world().bound_device_id)
    return process_group


def new_host_group(ranks: Sequence[int], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return the process group of `ranks`, of which this rank is one, for host memory.

    Every rank must call this, each with the group that it is in. `timeout` is that of an operation; without
    it, the world's own.
    """
    return _create(ranks, _new_name(ranks), backend="gloo", timeout=timeout)


def _new_name(ranks: Sequence[int]) -> str:
    """Return a name that no other group has: groups that are made together have no rank in common."""
    number = c10d._process_group_name([], use_hashed_name=False)
    return f"{number}:{min(ranks)}"


def _create(
    ranks: Sequence[int], name: str, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Make a group as new_group does on its members, and enter it into torch's tables."""
    world, members = this_world(), sorted(ranks)
    world_backend, store = c10d._world.pg_map[world]
    kind = dist.Backend(backend or world_backend)
    process_group, _ = c10d._new_process_group_helper(
        len(members),
        members.index(world.rank()),
        members,
        kind,
        store,
        name,  # type: ignore[arg-type]  # a NewType of str
        timeout=timeout or operation_limit() or c10d._get_default_timeout(kind),
        device_id=world.bound_device_id,
    )
    assert isinstance(process_group, dist.ProcessGroup), "this rank is a member"
    c10d._world.pg_group_ranks[process_group] = {rank: number for number, rank in enumerate(members)}
    return process_group


def _find_split(ranks: Sequence[int], all_groups: Groups) -> tuple[int, int]:
    """Return the number of the split that makes the group of `ranks`, and how many splits there are. No split
    makes a group of one rank."""
    own_group, own_split, colours = sorted(ranks), 0, Counter[int]()
    for members in (sorted(group) for group in all_groups if len(group) > 1):
        colour = c10d._process_group_color(members)
        if members == own_group:
            own_split = colours[colour]
        colours[colour] += 1
    return own_split, max(colours.values(), default=0)


_SHOW_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"


@contextmanager
def without_serialization_warning() -> Iterator[None]:
    """Process groups that are made inside do not warn that their sends and receives run in one order.

    For groups of two ranks in which one sends to the other: one order is what they are for. torch asks the
    environment when a group is made; a filter of Python warnings does not see what its C++ code prints.
    """
    before = os.environ.get(_SHOW_WARNING)
    os.environ[_SHOW_WARNING] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SHOW_WARNING]
        else:
            os.environ[_SHOW_WARNING] = before


# What a pipeline over NCCL needs of a GPU: a stream for each communicator, and hardware queues for streams.

NUM_STREAMS = 32  # of each priority in torch's pool
_DEFAULT_QUEUES = 8
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def check_streams(
    plan: Plan,
    groups: Iterable[Group],
    pairs: Collection[tuple[int, int]],
    pipeline: Group,
    everyone: Group,
    device: torch.device,
) -> None:
    """Refuse a pipeline whose messages could wait for each other; every rank must call this, and each raises.

    `groups` are those that this rank has already; `pairs` (sender, receiver), as `pipeline` numbers its
    ranks, are those that will have an edge.
    """
    # Messages of two ranks have a communicator of their own, unless the world is bound to a device.
    extra = int(dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is None)
    num_edges = sum(pipeline.rank in pair for pair in pairs)
    needed = num_edges * (1 + extra) + sum(_num_streams(group, extra) for group in groups)
    numbers = torch.tensor([needed, num_edges, -_hardware_queues()], device=device)
    everyone.all_reduce(numbers, "max")
    most, most_edges, fewest_queues = (abs(number) for number in numbers.tolist())
    raise_errors(f"plan '{plan}' over NCCL", list(_errors(most, most_edges, fewest_queues, extra)))


def _errors(num_streams: int, num_edges: int, queues: int, extra: int) -> Iterator[str]:
    if num_streams > NUM_STREAMS:
        unbound = " (and pass device_id to init_process_group: without it each takes two)" if extra else ""
        yield (
            f"communicators of one rank must not share a CUDA stream, and torch has {NUM_STREAMS}: one rank "
            f"needs {num_streams}, for messages to and from {num_edges // 2} ranks of neighbouring stages "
            f"and for its groups; use stages whose numbers of replicas differ less, or data= to replicate "
            f"the whole pipeline{unbound}"
        )
    if queues < _DEFAULT_QUEUES:
        yield (
            f"{_QUEUES} must be at least {_DEFAULT_QUEUES}, and a rank has {queues}: in so few hardware "
            f"queues an operation that waits for another rank holds up what that rank waits for; set it to "
            f"32 before CUDA starts, or unset it"
        )


def _num_streams(group: Group, extra: int) -> int:
    """Streams of a group that is not an edge: for its collectives, and for messages to two neighbours."""
    if isinstance(group, RecordingGroup) or group.size == 1:
        return 0
    return 1 + extra * min(group.size - 1, 2)


def _hardware_queues() -> int:
    """Return how many hardware queues CUDA was asked for; it ignores what is no number from 1 to 32."""
    text = os.environ.get(_QUEUES, "")
    return int(text) if text.isdecimal() and 1 <= int(text) <= 32 else _DEFAULT_QUEUES
