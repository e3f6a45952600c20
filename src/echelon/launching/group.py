"""The torch process group of a rank: which backend, which device, join and leave.

The only module here that imports torch when it is imported; the parent never needs it.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not marked so

_FOREVER = timedelta(days=365)
_SHORT_BYTES = 1024  # gathered in one operation


def timeout(seconds: float | None) -> timedelta:
    """For torch, which wants a number where we mean never."""
    return _FOREVER if seconds is None else timedelta(seconds=seconds)


def choose_backend(asked: str | None, local_ranks: int) -> str:
    """NCCL where every rank of this machine has a CUDA device to itself, else gloo."""
    if asked is not None:
        return asked
    return "nccl" if torch.cuda.is_available() and local_ranks <= torch.cuda.device_count() else "gloo"


def init_group(backend: str | None, local_rank: int, local_ranks: int, **how: Any) -> None:
    """Take this rank's device, then join; `how` goes to `init_process_group`."""
    chosen = choose_backend(backend, local_ranks)
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if chosen == "nccl":
            how["device_id"] = device  # without it NCCL guesses, and warns that it does
    dist.init_process_group(chosen, **how)


def join_by_file(
    path: str, rank: int, ranks: int, backend: str | None, timeout_seconds: float | None
) -> None:
    """Join ranks of this machine, which meet in a file: no port is opened for it."""
    init_group(
        backend,
        local_rank=rank,
        local_ranks=ranks,
        store=FileStore(path, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timeout(timeout_seconds),
    )


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def all_gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """The `data` of every rank of `group` (or of all), in rank order, on every one of them."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    ranks = dist.get_world_size(group)

    def all_gather(part: bytes, size: int) -> list[bytes]:
        padded = bytearray(part.ljust(size, b"\0"))  # torch wants the same size on all ranks
        local = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        gathered = [torch.empty_like(local) for _ in range(ranks)]
        dist.all_gather(gathered, local, group=group)
        return [each.cpu().numpy().tobytes() for each in gathered]

    # With 32 ranks on 2 cores one operation takes 0.1 s, so short data goes along with its length.
    first = all_gather(len(data).to_bytes(8, "little") + data[:_SHORT_BYTES], 8 + _SHORT_BYTES)
    lengths = [int.from_bytes(each[:8], "little") for each in first]
    missing = max(lengths) - _SHORT_BYTES
    rest = all_gather(data[_SHORT_BYTES:], missing) if missing > 0 else [b""] * ranks
    return [(head[8:] + tail)[:length] for head, tail, length in zip(first, rest, lengths, strict=True)]
