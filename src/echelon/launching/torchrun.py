"""Ranks that torchrun started, on one machine or several: join them, run a function among them."""

import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, final

from echelon.errors import UserError, raise_errors
from echelon.launching import settings
from echelon.launching.channel import is_launched_rank
from echelon.launching.results import decode, encode

T = TypeVar("T")

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_under_torchrun() -> bool:
    """Return whether this process is one of several that another launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and not is_launched_rank()


def join(backend: str | None = None, deadline: settings.Deadline = settings.FROM_ENVIRONMENT) -> None:
    """Join the process group that the environment describes; select this rank's CUDA device, if there is one.

    Does nothing in a plain script (RANK is not set). If this process has a group already, this checks that no
    two of its ranks use one GPU over NCCL. No parent supervises these ranks, so each gets a watchdog, which
    ends the job if no rank gives a sign of life for `deadline` seconds (None: no limit) while one waits.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from echelon.launching import group
    from echelon.launching.watch import watchdog

    if dist.is_initialized():
        if is_under_torchrun():
            watchdog.watch_world(settings.deadline_seconds(deadline))
        group.check_world()
        return
    if "RANK" not in os.environ:
        return
    missing = [name for name in _REQUIRED if name not in os.environ]
    raise_errors("the environment of this rank", [f"{name} is not set: use torchrun" for name in missing])
    seconds = settings.deadline_seconds(deadline)
    store, rank, ranks = next(rendezvous("env://", timeout=group.timeout(seconds)))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from echelon.launching.store_agreement import fresh_store

        store = fresh_store(store, rank, ranks, group.timeout(seconds))
    atexit.register(_leave)
    with watchdog.watching_joining_ranks(store, rank, ranks, seconds):
        group.init_group(store, rank, ranks, backend, group.timeout(settings.operation_seconds(seconds)))


def report_failure(reason: str) -> None:
    """This process ends with an error ('raised KeyError …'): its peers, if any, must not wait for it."""
    if "echelon.launching.watch.watchdog" in sys.modules:  # otherwise it has joined no ranks
        from echelon.launching.watch import watchdog

        watchdog.report_failure(reason)


def run_among_peers(
    fn: Callable[..., T],
    ranks: int,
    args: Sequence[object],
    backend: str | None,
    deadline: settings.Deadline,
    environment: settings.Environment | None,
) -> list[T]:
    """Run `fn(*args)` in this process. Rank 0 returns all results, others their own and that of rank 0."""
    world = int(os.environ["WORLD_SIZE"])
    if ranks != world:
        raise UserError(
            f"launch(ranks={ranks}) runs under torchrun with WORLD_SIZE={world}: they must be equal. "
            f"Use launch(ranks={world}), or start torchrun with {ranks} processes in total."
        )
    os.environ.update(settings.variables_of(environment, int(os.environ["RANK"])))
    join(backend, deadline)
    return share_results(fn(*args))


def share_results(value: object) -> list[Any]:
    """Return the results of all ranks; off rank 0, a RemoteResult for all but rank 0 and this rank.

    Every rank must call this. Each result comes from its bytes, also that of this rank, so it is the same
    wherever it is used. A result that cannot be sent is a TypeError on its rank, and a UserError on others.
    """
    import torch.distributed as dist

    from echelon.launching.group import all_gather_bytes, broadcast_bytes, gather_bytes

    data, error = b"", None
    try:
        data = encode(value)
    except Exception as refusal:  # every rank must learn of it, or the others would wait forever
        error = refusal
    state = [len(data), None if error is None else str(error) or type(error).__name__]
    states = [json.loads(each) for each in all_gather_bytes(json.dumps(state).encode())]
    if error is not None:
        raise error
    raise_errors("the results", [f"rank {rank}: {text}" for rank, (_, text) in enumerate(states) if text])
    lengths = [length for length, _ in states]
    gathered = gather_bytes(data, lengths)
    first = broadcast_bytes(data, lengths[0])
    if dist.get_rank() == 0:
        return [decode(each) for each in gathered]
    local = {0: first, dist.get_rank(): data}
    return [decode(local[rank]) if rank in local else RemoteResult(rank) for rank in range(len(states))]


def _leave() -> None:
    from echelon.launching import group

    # After an uncaught exception the peers may hang in a collective, and this would wait for them.
    if getattr(sys, "last_value", None) is None:
        group.leave()


@final
class RemoteResult:
    """Takes the place of another rank's result. It has its `rank`, and can be printed and copied.

    Every other use is refused: a comparison that is false would be wrong in silence.
    """

    __slots__ = ("rank",)
    __array_ufunc__ = None  # so that numpy leaves its operators to those below

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __repr__(self) -> str:
        return f"<the result of rank {self.rank}: not on this rank>"

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, because hasattr and copy expect one.
        raise AttributeError(f"{self._where()} (asked for .{name})")

    def __reduce__(self) -> tuple[type["RemoteResult"], tuple[int]]:
        return RemoteResult, (self.rank,)

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else repr(self)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(self._where())

    def _where(self) -> str:
        return (
            f"this rank does not have the result of rank {self.rank}, only rank 0 and rank {self.rank} "
            "have it: use it on rank 0 (if torch.distributed.get_rank() == 0)"
        )

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __round__ = __array__ = _refuse
    __len__ = __iter__ = __reversed__ = __contains__ = __getitem__ = __setitem__ = __delitem__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = (
        _refuse
    )
    __divmod__ = __rdivmod__ = __lshift__ = __rshift__ = __rlshift__ = __rrshift__ = _refuse
    __and__ = __or__ = __xor__ = __rand__ = __ror__ = __rxor__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = __call__ = _refuse
