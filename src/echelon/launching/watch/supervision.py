"""The watchdog of this process: started when it joins the ranks of torchrun, retired when it leaves them."""

import atexit
import itertools
import os
import sys
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not marked so

from echelon.launching.watch import pulse
from echelon.launching.watch.failure import is_peer_error
from echelon.launching.watch.watchdog import Watchdog, WhenEnded

_numbers = itertools.count()  # keeps the keys of one watchdog in a store apart from those of the next
_watchdog: Watchdog | None = None
_watched: "weakref.ref[dist.ProcessGroup] | None" = None


@contextmanager
def watching_joining_ranks(store: Store, rank: int, ranks: int, deadline: float | None) -> Iterator[None]:
    """Start this rank's watchdog; the process group of the world is joined inside.

    torch would abort a rank whose NCCL watchdog is stuck for 8 minutes. This one must find the ranks alive
    when the deadline has passed, to name what each one waits for.
    """
    if ranks > 1 and deadline is not None:
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        _start(store, rank, ranks, deadline, is_joining=True)
    pulse.enter_operation("join all")
    try:
        yield
    finally:
        pulse.leave_operation()
    _watch_world_of_now()
    if _watchdog is not None:
        _watchdog.is_joining = False


def watch_world(deadline: float | None) -> None:
    """Start a watchdog over a process group that is initialised already, if it has none."""
    world = dist.group.WORLD
    assert world is not None
    if world.size() == 1 or deadline is None or (_watched is not None and _watched() is world):
        return
    _start(dist.distributed_c10d._get_default_store(), world.rank(), world.size(), deadline)
    _watch_world_of_now()


def when_ended(call: WhenEnded) -> None:
    """Let this rank's watchdog, if there is one, call this with the reason before it ends the process."""
    if _watchdog is not None:
        _watchdog.when_ended.append(call)


def report_failure(reason: str) -> None:
    """This process ends with an error ('raised KeyError …'): the others must not wait for it."""
    if _watchdog is not None:
        _watchdog.fail(reason)


def _start(store: Store, rank: int, ranks: int, deadline: float, *, is_joining: bool = False) -> None:
    global _watchdog, _watched
    if _watchdog is None:
        atexit.register(_retire)
    else:
        _watchdog.leave()
    pulse.take_private_slot()
    # A connection of its own: the main thread may wait in the store for as long as it takes.
    own = PrefixStore(f"echelon/watchdog/{next(_numbers)}", store.clone())  # type: ignore[attr-defined]
    _watched = None
    _watchdog = Watchdog(
        own, rank, ranks, deadline, pulse.read_own, is_device_busy=_is_device_busy, is_over=_is_over
    )
    _watchdog.is_joining = is_joining
    _watchdog.start()


def _watch_world_of_now() -> None:
    global _watched
    world = dist.group.WORLD
    _watched = None if world is None else weakref.ref(world)


def _is_over() -> bool:
    """Whether the user has left the process group, and may do anything for any time."""
    return _watched is not None and (_watched() is None or _watched() is not dist.group.WORLD)


def _is_device_busy() -> bool:
    """Whether kernels are not done: over NCCL the device waits for other ranks, and the host need not."""
    return torch.cuda.is_initialized() and not torch.cuda.default_stream(_device()).query()


def _device() -> torch.device:
    world = dist.group.WORLD
    bound = None if world is None else world.bound_device_id
    return bound or torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def _retire() -> None:
    """At exit: tell the others whether it is with an error."""
    assert _watchdog is not None
    error = getattr(sys, "last_value", None)
    if error is None:
        _watchdog.leave()
    else:
        headline = "".join(traceback.format_exception_only(error)).strip()
        _watchdog.fail(f"raised {headline}", lost_peer=is_peer_error(error))
