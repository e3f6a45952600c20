"""Facts about this machine's processor and memory, from the operating system; torch's warnings about them.

The limits of a container (cgroup v2) count, which may be less than the machine has.
"""

import os
import platform
import warnings
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")

# What torch warns of in the first product of a process on a processor without bf16 or fp16 instructions, with
# a C++ stack trace: it then computes the product in another way, and correctly. The last one is of the first
# product of a backward pass on a GPU, whose thread gets its context there. pyproject.toml has these too.
TORCH_WARNINGS = (
    r"mkldnn_\w+ failed, switching to BLAS gemm",
    r".*(bf16|fp16) path needs (a|the) cpu",
    r"Attempting to run cuBLAS, but there was no current CUDA context",
)


def ignore_torch_warnings() -> None:
    """Hide warnings of torch that are about this processor, which the user cannot act upon."""
    for message in TORCH_WARNINGS:
        warnings.filterwarnings("ignore", message)


def cpu_model() -> str:
    """Return the processor's name, or at least its architecture."""
    return _fields(Path("/proc/cpuinfo")).get("model name") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the cores that this process may use, which can be fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, quota_cores(_text(_CGROUP / "cpu.max")) or cores)


def quota_cores(cpu_max: str) -> int | None:
    """Return the full cores in a cgroup's cpu.max ('250000 100000' is 2.5 cores), or None for no limit."""
    match cpu_max.split():
        case [quota, period] if quota != "max":
            return max(1, int(quota) // int(period))
    return None


def total_memory() -> int:
    """Return the bytes of memory that this machine, or its container, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _text(_CGROUP / "memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() else total


def available_memory() -> int | None:
    """Return the bytes that a new process can use without swapping; None if the system does not say."""
    available = _fields(Path("/proc/meminfo")).get("MemAvailable")  # "22916420 kB"
    return None if available is None else min(1024 * int(available.split()[0]), total_memory())


def _fields(path: Path) -> dict[str, str]:
    """Return the 'name : value' lines of a file; the last one wins if a name is repeated."""
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
