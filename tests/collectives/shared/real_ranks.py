"""What tests of shared memory over real ranks need."""

import os
import time
import weakref
from collections.abc import Callable

import torch.distributed as dist

from echelon.collectives import Ledger, group_over
from echelon.collectives.shared.group import SharedGroup
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.progress_loop import ProgressLoop
from echelon.launching import Ranks

Warm = Callable[[int], Ranks]

LARGE = 1_000_000  # elements: read directly

_can_read: "weakref.WeakKeyDictionary[Link, bool]" = weakref.WeakKeyDictionary()  # what each link found out


def world(direct: bool | None = None) -> SharedGroup:
    """All ranks; with `direct`, large tensors are read directly or not, whatever the link found out."""
    assert dist.group.WORLD is not None
    group = group_over("data", dist.group.WORLD, Ledger())
    assert isinstance(group, SharedGroup), "ranks of one host"
    possible = _can_read.setdefault(group._link, group._link.can_read)
    group._link.can_read = possible if direct is None else direct
    return group


def new_group(ranks: list[int] | None = None) -> SharedGroup:
    """A process group of its own."""
    process_group = dist.new_group(ranks)
    assert isinstance(process_group, dist.ProcessGroup)
    group = group_over("data", process_group, Ledger())
    assert isinstance(group, SharedGroup)
    return group


def loop_of(group: SharedGroup) -> ProgressLoop:
    return group._link._progress_loop


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Return when the condition holds: another thread or rank makes it so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.001)


def result_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__
    return "went on"


def message_in_child(work: Callable[[], object]) -> str:
    """The error that a forked child gets from this."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except RuntimeError as error:
            os.write(sending, str(error).encode())
        finally:
            os._exit(0)
    os.close(sending)
    message = os.read(receiving, 1000).decode()
    os.close(receiving)
    os.waitpid(child, 0)
    return message
