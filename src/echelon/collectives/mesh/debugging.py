"""debug=true: lets the groups of a mesh compare what their ranks call."""

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not marked so
from torch.distributed import distributed_c10d as c10d

from echelon.collectives import CallComparison, Group
from echelon.launching.group import operation_limit

_DEFAULT_LIMIT = timedelta(minutes=30)

# A connection to the store of each world: its main thread waits there for what others call.
_stores: "weakref.WeakKeyDictionary[dist.ProcessGroup, Store]" = weakref.WeakKeyDictionary()


def compare_calls(group: Group, device: torch.device) -> None:
    """Let `group` compare its calls from here on, if it talks to processes; all its ranks must call this."""
    process_group: dist.ProcessGroup | None = getattr(group, "process_group", None)
    if process_group is None:
        return
    store = PrefixStore(f"echelon/debug/{process_group.group_name}", _store())
    ranks = dist.get_process_group_ranks(process_group)
    queue_per_peer = group.has_queue_per_peer(device)
    group.comparison = CallComparison(store, group.rank, ranks, queue_per_peer=queue_per_peer)


def _store() -> Store:
    world = dist.group.WORLD
    assert world is not None
    if world not in _stores:
        store = c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(operation_limit() or _DEFAULT_LIMIT)
        _stores[world] = store
    return _stores[world]
