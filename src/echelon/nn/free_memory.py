"""How much memory a device has left."""

import os
from pathlib import Path

import torch

from echelon.quantities import show_bytes


def free_bytes(device: torch.device) -> int:
    """Bytes that this process could still take: of a CUDA device also those that torch has kept for it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    table = Path("/proc/meminfo")
    if table.exists():
        for line in table.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def reason_not_to_take(needed: int, content: str, device: torch.device) -> str:
    """Say why an audit should not take so many bytes; empty if it may."""
    free = free_bytes(device)
    if 2 * needed <= free:
        return ""
    return (
        f"{content} take {show_bytes(needed)} on rank 0, which has {show_bytes(free)} free, half of it for "
        "the audit"
    )
