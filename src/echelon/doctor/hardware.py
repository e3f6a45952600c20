"""Plain facts about this machine's processor and memory, from the operating system; no judgement.

A container may be given less than the machine has: its limits (cgroup v2) count.
"""

import os
import platform
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cpu_model() -> str:
    """The processor's name, or at least its architecture."""
    return _fields(Path("/proc/cpuinfo")).get("model name") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """The cores that this process may use, which can be fewer than there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, quota_cores(_text(_CGROUP / "cpu.max")) or cores)


def quota_cores(cpu_max: str) -> int | None:
    """The whole cores in a cgroup's cpu.max ('250000 100000' is 2.5 of them), or None for no limit."""
    match cpu_max.split():
        case [quota, period] if quota != "max":
            return max(1, int(quota) // int(period))
    return None


def total_memory() -> int:
    """Bytes of memory, or of it what a container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _text(_CGROUP / "memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def available_memory() -> int | None:
    """Bytes that a new process can have without swapping; None where the system does not tell."""
    available = _fields(Path("/proc/meminfo")).get("MemAvailable")  # "22916420 kB"
    return None if available is None else min(1024 * int(available.split()[0]), total_memory())


def _fields(path: Path) -> dict[str, str]:
    """The 'name : value' lines of a file; of a name that comes again, the last."""
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
