"""The server: authoritative weights, the only optimizer, the version, and the log of how it came about.

It is a monitor: any thread may call any method, for any worker, and each holds the one lock while it acts.
Who calls it, and how requests come from other ranks, is in port.py.

    pull         waits until the worker may start its step, then copies the weights out
    push         one update of this gradient; with staleness 0 one of the whole round's, once they are here
    synchronize  waits until every worker is here; then all copy the same weights out
"""

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.launching import PeerLost
from echelon.parallel.data.buckets import Bucket
from echelon.parallel.data.gradients import clip_factor, squared_norm
from echelon.state.ownership import LocalParameter
from echelon.update.optim.learning_rate import LearningRate
from echelon.update.precision.stepper import Stepper
from echelon.update.update import Push


class ServerFailed(RuntimeError):  # noqa: N818
    """An update failed on the server, so that no worker can go on."""


class PushResult(NamedTuple):
    """The result of a push: the version after it, and the loss total, count and norm of that update."""

    version: int
    total: float
    counted: float
    norm: float


@dataclass(eq=False)
class Gradient:
    """One worker's gradient, in buckets; `used` flags parameters in the model's order. Times `factor` it is
    that of the loss total. In fp16 that product may be too small or too large. Pushed in `step`; `result`:
    what came of it."""

    buckets: list[Bucket]
    used: Tensor
    total: float
    count: float
    factor: float = 1.0
    step: int = 0
    result: PushResult | None = None


@final
class Server:
    """Weights of which `weights` is the memory and `local` the views that the optimizer updates."""

    def __init__(
        self,
        weights: list[Bucket],
        local: list[LocalParameter],
        stepper: Stepper,
        learning_rate: LearningRate,
        *,
        workers: int,
        staleness: float,
        clip: float | None,
        skips_overflows: bool = False,
    ) -> None:
        """`skips_overflows`: gradients that are not finite make no update, because losses were scaled."""
        self._weights, self._local, self._stepper = weights, local, stepper
        self._learning_rate = learning_rate
        self._clip, self._in_rounds, self._skips_overflows = clip, staleness == 0, skips_overflows
        self._changed = threading.Condition()
        self.queue = DeviceQueue(weights[0].buffer.device if weights else torch.device("cpu"))
        self._clocks = Clocks(workers, staleness)
        self._pulled = [0] * workers
        self._round: dict[int, Gradient] = {}  # by worker
        self._taking: set[int] = set()  # who has not yet copied the weights that all synchronized on
        self._log: list[Push] = []
        self._error: BaseException | None = None
        self._num_requests = 0
        self.version = 0
        self.traffic = Ledger()  # of all connections; `count` adds to it, `drain` empties it

    # What workers ask.

    def pull(self, worker: int, step: int, into: Sequence[Tensor]) -> int:
        """Copy the newest weights out for `step`, once it may start; returns their version."""
        with self._changed:
            self._wait(lambda: self._clocks.may_start(worker, step))
            return self._copy_out(worker, into)

    def push(self, worker: int, step: int, gradient: Gradient) -> PushResult:
        """Return when the gradient is part of the weights. It belongs to the server until then."""
        gradient.step, gradient.result = step, None
        # Whichever thread updates, the gradient is there by then.
        with self.queue.behind_caller(), self._changed:
            self._round[worker] = gradient
            self._changed.notify_all()
            self._wait(
                lambda: (
                    gradient.result is not None
                    or not self._in_rounds
                    or self._clocks.awaited(step) <= self._round.keys()
                )
            )
            if gradient.result is None:
                self._update()
            assert gradient.result is not None
            return gradient.result

    def synchronize(self, worker: int, into: Sequence[Tensor]) -> int:
        """Wait for all workers to synchronize, copy the weights out, and return when all have."""
        with self._changed:
            self._clocks.rest(worker)
            self._changed.notify_all()
            self._wait(lambda: worker in self._taking or (self._clocks.all_rest and not self._taking))
            if worker not in self._taking:
                self._taking = self._clocks.wake()
            version = self._copy_out(worker, into)
            self._taking.discard(worker)
            self._changed.notify_all()
            # The server's rank may queue a collective next, and wait for it in a call that holds the lock of
            # the device's driver. A worker without its copy would never join: its copy needs that lock.
            self._wait(lambda: not self._taking)
            return version

    def log(self, version: int) -> list[Push]:
        with self._changed:
            self._check()
            return [entry for entry in self._log if entry.pushed <= version]

    def leave(self, worker: int) -> None:
        """The worker will ask for nothing more: no other waits for it."""
        with self._changed:
            self._clocks.leave(worker)
            self._taking.discard(worker)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nothing can go on: raise `error` in every thread that waits here or asks from now on."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # What its own rank asks.

    def state(self) -> list[tuple[LocalParameter, dict[str, Tensor]]]:
        """The optimizer's state, and the master, of each parameter."""
        with self._changed, self.queue.behind_caller():
            return [(local, self._stepper.state(local)) for local in self._local]

    def load(self, load: Callable[[LocalParameter], None]) -> None:
        """Let `load` give each parameter other values, and other state."""
        with self._changed, self.queue.behind_caller():
            for local in self._local:
                load(local)

    def restore(self, version: int, completed: Sequence[int]) -> None:
        """Go on at a version, with workers that have completed so many steps; the log begins here."""
        with self._changed:
            self.version, self._log, self._round = version, [], {}
            self._pulled = [version] * len(completed)
            self._clocks.restore(completed)

    def drain(self, ledger: Ledger) -> None:
        """Move what connections have counted so far into the rank's own ledger."""
        with self._changed:
            ledger.absorb(self.traffic)

    def count(self, ledger: Ledger) -> None:
        """A connection has answered one request, and `ledger` says what that moved."""
        with self._changed:
            self._num_requests += 1
            self.traffic.absorb(ledger)

    def linger(self, patience: float) -> None:
        """Serve on until all workers have left, or none has asked anything for `patience` seconds."""
        with self._changed:
            heard = -1
            while not self._over() and heard != self._num_requests:
                heard = self._num_requests
                self._changed.wait_for(self._over, patience)

    # Under the lock.

    def _over(self) -> bool:
        return self._clocks.all_gone or self._error is not None

    def _check(self) -> None:
        if isinstance(self._error, PeerLost):
            raise PeerLost(str(self._error)) from self._error
        if self._error is not None:
            raise ServerFailed(f"{type(self._error).__name__}: {self._error}") from self._error

    def _wait(self, until: Callable[[], bool]) -> None:
        self._check()
        self._changed.wait_for(lambda: self._error is not None or until())
        self._check()

    def _copy_out(self, worker: int, into: Sequence[Tensor]) -> int:
        with self.queue.behind_caller():
            for target, bucket in zip(into, self._weights, strict=True):
                target.copy_(bucket.buffer)
        self._pulled[worker] = self.version
        return self.version

    def _update(self) -> None:
        """One optimizer step of the count-weighted mean of all contributions, added in worker order."""
        try:
            self._apply(sorted(self._round.items()))
        except BaseException as error:
            self.fail(error)
            raise
        self._round = {}
        self._changed.notify_all()

    def _apply(self, round_: list[tuple[int, Gradient]]) -> None:
        gradients = [gradient for _, gradient in round_]
        total, count = sum(each.total for each in gradients), sum(each.count for each in gradients)
        norm = mean = 0.0
        if count > 0:
            summed = _sum(gradients)
            self._give(summed)
            mean = summed.factor / count
            norm = self._norm() * mean
        makes_version = count > 0 and (math.isfinite(norm) or not self._skips_overflows)
        if makes_version:
            self._learning_rate.set(self.version)
            self._stepper.step(clip_factor(norm, self._clip) * mean)
            self.version += 1
        for worker, gradient in round_:
            if makes_version:
                self._log.append(Push(worker, gradient.step, self._pulled[worker], self.version))
            self._clocks.complete(worker, gradient.step)
            gradient.result = PushResult(self.version, total, count, norm)

    def _give(self, gradient: Gradient) -> None:
        """Make it the gradient of the weights; what no worker used has none, as on one device."""
        views: dict[nn.Parameter, Tensor] = {}
        for bucket in gradient.buckets:
            views |= bucket.views
        for local, used in zip(self._local, gradient.used.tolist(), strict=True):
            local.tensor.grad = views[local.parameter] if used else None

    def _norm(self) -> float:
        gradients = [local.tensor.grad for local in self._local if local.tensor.grad is not None]
        return math.sqrt(squared_norm(gradients, torch.device("cpu")))


def _sum(gradients: list[Gradient]) -> Gradient:
    """The sum, in the memory of the first, with the factor of one that counts; others add zeros."""
    first, *rest = gradients
    first.factor = next(each.factor for each in gradients if each.count > 0)
    for other in rest:
        for total, part in zip(first.buckets, other.buckets, strict=True):
            total.buffer.add_(part.buffer, alpha=other.factor / first.factor)
        first.used |= other.used
    return first


# The server's own queue of device work.

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream


@final
class DeviceQueue:
    """A stream of its own on a GPU; on the CPU work is done when the call returns, and there is no queue."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _new_stream(device) if device.type == "cuda" else None
        with self.behind_caller():
            pass  # what the caller has queued so far may be what this queue will work on

    @contextmanager
    def behind_caller(self) -> Iterator[None]:
        """Queue the work inside after the caller's work so far, and before the caller's later work."""
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def alone(self) -> AbstractContextManager[object]:
        """Queue the work inside without an order with the caller's stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that no other code has. torch hands out the same 32 again and again, to NCCL too."""
    if torch.version.hip is not None:
        return torch.cuda.Stream(device, priority=-1)  # those of NCCL have priority 0
    pointer = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # starts CUDA in this thread
        code = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(pointer), _NON_BLOCKING)
    if code != 0 or pointer.value is None:
        raise RuntimeError(f"CUDA made no stream on {device}: cuStreamCreate returned {code}")
    return torch.cuda.ExternalStream(pointer.value, device)


# Who may go on: how many steps each worker has made, and how far apart they may be. Holds no lock.


@final
class Clocks:
    """The steps that workers have completed. None may start more than `staleness` ahead of the slowest. A
    worker that rests (it waits for all others to rest too) or is gone delays no other."""

    def __init__(self, workers: int, staleness: float) -> None:
        self._staleness = staleness
        self._completed = [0] * workers
        self._resting: set[int] = set()
        self._gone: set[int] = set()

    def may_start(self, worker: int, step: int) -> bool:
        others = [self._completed[other] for other in self._stepping() if other != worker]
        return step - min(others, default=step) <= self._staleness

    def complete(self, worker: int, step: int) -> None:
        self._completed[worker] = step + 1

    def restore(self, completed: Sequence[int]) -> None:
        self._completed = list(completed)

    def awaited(self, step: int) -> set[int]:
        """The workers whose push of `step` is still to come: those further on have made theirs."""
        return {worker for worker in self._stepping() if self._completed[worker] <= step}

    def rest(self, worker: int) -> None:
        self._resting.add(worker)

    def leave(self, worker: int) -> None:
        self._gone.add(worker)
        self._resting.discard(worker)

    @property
    def all_rest(self) -> bool:
        return not self._stepping()

    def wake(self) -> set[int]:
        """All who rest go on; returns who they were."""
        woken, self._resting = self._resting, set()
        return woken

    @property
    def all_gone(self) -> bool:
        return len(self._gone) == len(self._completed)

    def _stepping(self) -> set[int]:
        return set(range(len(self._completed))) - self._resting - self._gone
