"""Ranks that torchrun started, on one machine or several: join them, run a function among them."""

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from echelon.errors import UserError, raise_errors
from echelon.launching.channel import is_launched_rank
from echelon.launching.errors import RankFailed
from echelon.launching.transport import pack, unpack

T = TypeVar("T")

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_under_torchrun() -> bool:
    """Whether this process is one of several that another launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and not is_launched_rank()


def join(backend: str | None = None, deadline: float | None = 1800.0) -> None:
    """Join the process group that the environment describes, with one CUDA device per local rank.

    Does nothing in a plain script (RANK is not set), or if this process has joined a group already.
    Nothing supervises these ranks here, so `deadline` is torch's own timeout of one operation.
    """
    if "RANK" not in os.environ:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        return
    missing = [name for name in _REQUIRED if name not in os.environ]
    raise_errors("the environment of this rank", [f"{name} is not set: use torchrun" for name in missing])
    from echelon.launching import group

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    group.init_group(backend, local_rank, local_ranks, timeout=group.timeout(deadline))
    atexit.register(_leave)


def run_among_peers(
    fn: Callable[..., T], ranks: int, args: Sequence[object], backend: str | None, deadline: float | None
) -> list[T]:
    """Run `fn(*args)` in this process; return every rank's result, on every rank."""
    world = int(os.environ["WORLD_SIZE"])
    if ranks != world:
        raise UserError(
            f"launch(ranks={ranks}) runs under torchrun with WORLD_SIZE={world}: they must be equal. "
            f"Use launch(ranks={world}), or start torchrun with {ranks} processes in total."
        )
    join(backend, deadline)
    from echelon.launching import group

    return [unpack(data) for data in group.all_gather_bytes(_pack_result(fn(*args)))]


def _pack_result(value: object) -> bytes:
    try:
        return pack(value)
    except Exception as error:
        reason = f"returned a {type(value).__name__}, which cannot be sent to the other ranks: {error}"
        raise RankFailed(int(os.environ["RANK"]), reason) from error


def _leave() -> None:
    from echelon.launching import group

    # After an uncaught exception the peers may hang in a collective, and this would wait for them.
    if getattr(sys, "last_value", None) is None:
        group.leave()
