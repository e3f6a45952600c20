"""Operations that torch.distributed has begun, and what is made of several of them."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, final

import torch.distributed as dist

from echelon.collectives.work import Work
from echelon.launching import PeerLost
from echelon.launching.watch.failure import is_peer_error


@final
class TorchWork(Work):
    """A c10d work object, which keeps its tensors; `place` opens the message when a peer is lost.

    `is_on_host`: it runs in a thread, so a callback tells when it was complete. Over NCCL a callback would
    run at once, on one of torch's 32 streams, which then waits for the operation. That stream may be one of
    another communicator, whose messages would wait too: a deadlock that depends on how many came before.
    """

    def __init__(self, work: dist.Work, tensors: tuple[Any, ...], place: str, *, is_on_host: bool) -> None:
        self._work, self._tensors, self._place = work, tensors, place
        self._done_at: float | None = None
        if is_on_host:
            # Sends, receives and Gloo's reduce-scatter have no future: the return of `wait` counts for them.
            with contextlib.suppress(RuntimeError):
                work.get_future().add_done_callback(self._record_time)

    def _record_time(self, _: Any) -> None:
        self._done_at = time.perf_counter()

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise explained(error, self._place) from error

    def done_at(self) -> float | None:
        return self._done_at

    def done(self) -> bool:
        return self._work.is_completed()  # always False for Gloo's sends and receives


@final
class CombinedWork(Work):
    """Several works: complete when the last one is."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def done_at(self) -> float | None:
        times = [work.done_at() for work in self._works]
        return max((time for time in times if time is not None), default=None)


@final
class ChainedWork(Work):
    """A work, and then something on this rank, which `wait` does."""

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        self._work.wait()
        self._finish()

    def in_background(self) -> None:
        self._work.in_background()

    def done_at(self) -> float | None:
        return None


def explained(error: RuntimeError, place: str) -> RuntimeError:
    """A PeerLost when a peer caused it, so that the launcher looks for the cause in another rank."""
    if is_peer_error(error):
        return PeerLost(f"{place} lost a peer: {error}")
    return error
