"""What the tests ask the system about processes."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc, which Linux has")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"  # a zombie runs no more; whoever is its parent now may be slow to reap


def still_alive(pids: Iterable[int], seconds: float = 60.0) -> list[int]:
    """Those of `pids` that have not ended after `seconds`."""
    pids = list(pids)
    wait_until(lambda: not any(alive(pid) for pid in pids), seconds)
    return [pid for pid in pids if alive(pid)]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that they have."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, last = {pid}, set[int]()
    while found != last:
        last = found
        found = found | {child for child, parent in parents.items() if parent in found}
    return found - {pid}
