"""Whether what a plan puts into host memory fits there: asked before any of it is taken.

All ranks of a machine share its memory. They tell each other what each needs and on which machine it is, and
refuse together. What a rank takes beside the offloads (the process, batches, communication) comes on top.
"""

import socket
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from echelon.collectives.agreement import gather_rows
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.hardware import available_memory
from echelon.parallel.expert import experts_of
from echelon.quantities import show_bytes

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NO_LIMIT = 2**62


def check_host_memory(needs: Mapping[str, int], mesh: Mesh) -> None:
    """Raise, on every rank, if the ranks of some machine need more of its memory than is there. All ranks
    call this with the same categories; `needs`: the bytes of each that this rank will take."""
    if not mesh.plan.offload:
        return
    free = available_memory()
    own = [_machine(), _NO_LIMIT if free is None else free, *needs.values()]
    numbers = torch.tensor(own, dtype=torch.int64, device=mesh.device)
    rows = gather_rows(numbers, mesh.group("all"), "agreement").tolist()
    for machine in dict.fromkeys(row[0] for row in rows):
        local = [row[1:] for row in rows if row[0] == machine]
        sizes = dict(zip(needs, map(sum, zip(*(row[1:] for row in local), strict=True)), strict=True))
        free = min(row[0] for row in local)
        if sum(sizes.values()) > free:
            raise UserError(_message(sizes, free, len(local), mesh))


def parameter_bytes(modules: Mapping[int, nn.Module], mesh: Mesh, resident_bytes: int) -> int:
    """What offload=parameters puts into host memory on this rank; 0 without it. On a CPU weights that have
    values only move."""
    if "parameters" not in mesh.plan.offload:
        return 0
    parameters = {p for module in modules.values() for p in module.parameters()}
    if mesh.device.type == "cpu" and not any(p.is_meta for p in parameters):
        return 0
    experts = {p for module in modules.values() for p in experts_of(module)}
    total = _held_bytes(parameters - experts, mesh, "shard")
    total += _held_bytes(experts, mesh, "expert_shard") if experts else 0
    return max(0, total - resident_bytes)


def _held_bytes(parameters: Iterable[nn.Parameter], mesh: Mesh, axis: str) -> int:
    """Of the part that this rank has, if the ranks along `axis` share them out."""
    parts = mesh.group(axis).size if mesh.plan.zero == 3 else 1
    return sum(p.numel() * p.element_size() for p in parameters) // parts


def _machine() -> int:
    """The same number for all processes of one machine, or container."""
    boot = _BOOT.read_text() if _BOOT.exists() else ""
    return zlib.crc32(f"{socket.gethostname()} {boot}".encode())


def _message(sizes: Mapping[str, int], free: int, ranks: int, mesh: Mesh) -> str:
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in sizes.items() if size)
    together = f"the {ranks} ranks of a machine put" if ranks > 1 else "it puts"
    return (
        f"plan '{mesh.plan}': {together} {show_bytes(sum(sizes.values()))} into host memory ({parts}), and "
        f"{show_bytes(free)} of it is available; offload less, use more machines with zero=3, or a smaller "
        "model; with offload=parameters resident_bytes keeps a part of the weights on the device"
    )
