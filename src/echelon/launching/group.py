"""The torch process group of a rank: agree on backend and devices, join, leave; bytes between all its ranks.

Imports torch at once, as `store_agreement.py` does; the parent needs neither.
"""

import itertools
import os
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not marked so

from echelon.errors import UserError
from echelon.launching.placement import Placement, RankReport, check_devices, place
from echelon.launching.store_agreement import agree

# torch hands timeouts to poll() as milliseconds in 32 bits: 24.8 days.
_LONGEST = timedelta(days=24)

# With the default of 8, the streams of several NCCL communicators share a hardware queue, and a receive that
# waits for its peer blocks the kernels behind it.
_CUDA_QUEUES = "32"

_numbers = itertools.count()  # keeps the keys of one agreement in a store apart from those of the next


class _CheckedWorld(NamedTuple):
    """A group of all ranks whose devices are checked. The user may leave it, and initialise another."""

    group: "weakref.ref[dist.ProcessGroup]"
    limit: timedelta | None  # of one operation; None if the user initialised the group


_checked_world: _CheckedWorld | None = None


def operation_limit() -> timedelta | None:
    """Return how long an operation of a group that was joined here may take; None if the user joined it."""
    checked = _current_check()
    return None if checked is None else checked.limit


def timeout(seconds: float | None) -> timedelta:
    """Return a timeout for torch, which has no value that means never."""
    return _LONGEST if seconds is None else timedelta(seconds=min(seconds, _LONGEST.total_seconds()))


def init_group(
    store: Store, rank: int, ranks: int, backend: str | None, limit: timedelta, *, same_host: bool = False
) -> None:
    """Agree with all ranks on backend and devices, select this rank's device, then join.

    With `same_host` all ranks run on this host, with the same environment, numbered as in the job. Then each
    knows what the others would report, and decides the same without them.
    """
    # CUDA reads this when it starts; later it would only mislead. Not under MPS, where queues are few and all
    # processes share them: two ranks would take all.
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if not os.path.exists(pipes) and not torch.cuda.is_initialized():
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _CUDA_QUEUES)
    store.set_timeout(limit)
    if same_host:
        placement = place(_reports_of_this_host(ranks), backend)
    else:
        keys = _new_keys("placement", store)
        placement = Placement(
            *agree(keys, rank, ranks, report_visible, lambda reports: place(_parse(reports), backend))
        )
    if placement.note and rank == 0:
        print(f"echelon: {placement.note}", file=sys.stderr, flush=True)
    index = placement.devices[rank]
    device = None if index is None else torch.device("cuda", index)
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        placement.backend,
        store=PrefixStore("default_pg", store),
        rank=rank,
        world_size=ranks,
        timeout=limit,
        device_id=device if placement.uses_nccl else None,  # otherwise NCCL guesses it, with a warning
    )
    _mark_checked(limit)


def check_world() -> None:
    """Check the devices of a process group that the user initialised; every rank must call this.

    NCCL itself fails late and unclearly where two ranks use one GPU. Does nothing for other backends, and for
    a group that was checked before.
    """
    if _current_check() is not None:
        return
    world = this_world()
    if backend_for("cuda") == "nccl":
        keys = _new_keys("devices", dist.distributed_c10d._get_default_store())
        agree(
            keys, world.rank(), world.size(), report_current, lambda reports: check_devices(_parse(reports))
        )
    _mark_checked(limit=None)


def agree_in_world(report: Callable[[], object], decide: Callable[[list[Any]], object]) -> Any:
    """Call `agree` among all ranks of the process group, which must all call this.

    They wait in its store, as long as it takes: an operation has a limit.
    """
    world = this_world()
    keys = _new_keys("agreement", dist.distributed_c10d._get_default_store())
    return agree(keys, world.rank(), world.size(), report, decide, limit=_LONGEST)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the name of the group's backend for each type of device.

    The group knows, its name does not: one that was initialised with "cpu:gloo,cuda:nccl" has two backends.
    """
    return {device.type: group._get_backend(device).name() for device in group._device_types}


def backend_for(device_type: str, group: dist.ProcessGroup | None = None) -> str | None:
    """Return the name of the backend that moves tensors of this kind of device; None if the group has none.

    Without `group`, that of all ranks.
    """
    return backends_of(group or this_world()).get(device_type)


def launch_backend(ranks: int) -> str:
    """Return the backend of `launch` with so many ranks on this machine."""
    return place(_reports_of_this_host(ranks), None).backend


def leave(*, together: bool = False) -> None:
    """Destroy the process group, if there is one. `together`: all ranks leave at once, and wait for each
    other, because a rank that ends early may lose its last NCCL sends."""
    if dist.is_initialized():
        if together and backend_for("cuda") == "nccl":
            torch.cuda.synchronize()  # the barrier is on another stream than the sends
            dist.barrier()
        dist.destroy_process_group()


def _reports_of_this_host(ranks: int) -> list[RankReport]:
    here = report_visible()
    return [here._replace(local_rank=rank) for rank in range(ranks)]


def _parse(reports: list[Any]) -> list[RankReport]:
    return [RankReport(*report) for report in reports]


def _new_keys(name: str, store: Store) -> PrefixStore:
    return PrefixStore(f"echelon/{name}/{next(_numbers)}", store)


def _mark_checked(limit: timedelta | None) -> None:
    global _checked_world
    _checked_world = _CheckedWorld(weakref.ref(this_world()), limit)


def _current_check() -> _CheckedWorld | None:
    """Return what is known of the group that is initialised now, if it was checked."""
    is_current = _checked_world is not None and _checked_world.group() is dist.group.WORLD is not None
    return _checked_world if is_current else None


def this_world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "no process group is initialised"
    return world


# Of torchrun, SLURM, Open MPI, MPICH and Intel MPI, and PALS, in this order.
_LOCAL_RANK_NAMES = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def report_visible() -> RankReport:
    """Return the report of a rank that has not chosen its GPU yet: it lists every GPU that it sees."""
    return RankReport(socket.gethostname(), host_id(), local_rank(), visible_gpus())


def report_current() -> RankReport:
    """Return the report of a rank whose user has chosen a GPU: it lists the current one."""
    gpus = (_gpu_id(torch.cuda.current_device()),) if torch.cuda.is_available() else ()
    return RankReport(socket.gethostname(), host_id(), local_rank(), gpus)


def host_id() -> str:
    """Equal for processes that NCCL takes for processes of one host."""
    if identity := os.environ.get("NCCL_HOSTID"):
        return identity
    # Containers may have the name of another host, and a name that is not unique has another boot id.
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot_id}"


def local_rank() -> int | None:
    """Return the number of this rank on its host, if the launcher gave one."""
    for name in _LOCAL_RANK_NAMES:
        if text := os.environ.get(name):
            if not text.isdecimal():
                raise UserError(f"{name}={text!r} in the environment: must be an integer of at least 0")
            return int(text)
    return None


def visible_gpus() -> tuple[str, ...]:
    """Return the identities of the GPUs that this process sees, in CUDA's order."""
    if torch.cuda._is_in_bad_fork():
        raise UserError(
            "CUDA was started in the fork server, so no rank can use it: a module that ranks preload "
            "uses CUDA when it is imported. Move that into a function, or do not pass the module to "
            "echelon.launching.preload."
        )
    if not torch.cuda.is_available():
        return ()
    return tuple(_gpu_id(index) for index in range(torch.cuda.device_count()))


def _gpu_id(index: int) -> str:
    """Return an identity that does not depend on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(index).uuid)


_SHORT_BYTES = 1024  # gathered in one operation
_CHUNK_BYTES = 1 << 26  # what is in device memory at once, where the group moves nothing else


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Return the `data` of every rank, in rank order."""
    device = _device()
    ranks = dist.get_world_size()

    def all_gather(part: bytes, size: int) -> list[bytes]:
        padded = bytearray(part.ljust(size, b"\0"))  # torch wants the same size on all ranks
        local = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        gathered = [torch.empty_like(local) for _ in range(ranks)]
        dist.all_gather(gathered, local)
        return [each.cpu().numpy().tobytes() for each in gathered]

    # With 32 ranks on 2 cores one operation takes 0.1 s, so short data goes along with its length.
    first = all_gather(len(data).to_bytes(8, "little") + data[:_SHORT_BYTES], 8 + _SHORT_BYTES)
    lengths = [int.from_bytes(each[:8], "little") for each in first]
    missing = max(lengths) - _SHORT_BYTES
    rest = all_gather(data[_SHORT_BYTES:], missing) if missing > 0 else [b""] * ranks
    return [(head[8:] + tail)[:length] for head, tail, length in zip(first, rest, lengths, strict=True)]


def gather_bytes(data: bytes, lengths: Sequence[int]) -> list[bytes]:
    """On rank 0 the `data` of every rank, in rank order, of which it must know the lengths; elsewhere []."""
    if dist.get_rank() != 0:
        _move(_host_tensor(data), partial(dist.send, dst=0))
        return []
    gathered = [data]
    for source, length in enumerate(lengths[1:], start=1):
        received = torch.empty(length, dtype=torch.uint8)
        _move(received, partial(dist.recv, src=source))
        gathered.append(received.numpy().tobytes())
    return gathered


def broadcast_bytes(data: bytes, length: int) -> bytes:
    """Rank 0's `data`, which has `length` bytes."""
    is_source = dist.get_rank() == 0
    buffer = _host_tensor(data) if is_source else torch.empty(length, dtype=torch.uint8)
    _move(buffer, partial(dist.broadcast, src=0))
    return data if is_source else buffer.numpy().tobytes()


def _move(buffer: Tensor, operation: Callable[[Tensor], object]) -> None:
    """Apply `operation` to `buffer`, part by part, on a device that the group can move from."""
    device = _device()
    for part in buffer.split(_CHUNK_BYTES):
        moved = part.to(device)
        operation(moved)
        if moved is not part:
            part.copy_(moved)


def _host_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _device() -> torch.device:
    return torch.device("cpu" if backend_for("cpu") is not None else "cuda")
