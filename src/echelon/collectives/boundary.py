"""The boundary between a rank's device and the memory of its host: memory over there, and copies across it.

    store    device → host      behind the computation that comes after the tensor
    fetch    host → device      ahead of the computation that needs it

A copy begins when it is issued and runs beside what the device computes. `wait` lets all that is issued later
see it done; `join` returns when it is done, before host code reads or writes the host's side. Until one of
them, both sides of a copy belong to it. Copies of one direction run in the order of their calls.

Without a GPU the boundary is pretended: both sides are memory of the host, and a copy is made when it
is waited for, as late as may be. So a test finds what was read or overwritten without a wait.
"""

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor

from echelon.collectives.ledger import Ledger, Move, Traffic
from echelon.collectives.work import HOST_TIMING, EventTiming, Timing, Work, cuda_clock
from echelon.errors import UserError
from echelon.quantities import show_bytes

AXIS = "host"  # of the ledger
STORE, FETCH = "store", "fetch"
_PAGE = 4096  # bytes, or a divisor of a page


class HostMemoryError(UserError):
    """The host has no memory for copies to and from the device."""


class CopyWork(Work):
    @abstractmethod
    def join(self) -> None:
        """Return when it is complete. Any thread may call this."""


@final
class Copy:
    """The caller's end of a copy. It keeps the device's side until the first `wait`."""

    __slots__ = ("_ledger", "_move", "_timing", "_work", "host", "tensor")

    def __init__(
        self, tensor: Tensor, host: Tensor, work: CopyWork, ledger: Ledger, move: Move, timing: Timing
    ) -> None:
        self.tensor: Tensor | None = tensor
        self.host = host
        self._work, self._ledger, self._timing = work, ledger, timing
        self._move: Move | None = move

    def wait(self) -> None:
        """Let work that is issued from now on wait for the copy. Only the thread of the step calls this, once
        for every copy; more calls are harmless."""
        if self._move is not None:
            self._timing.wait(self._work, self._move, self._ledger)
            self._move = self.tensor = None

    def join(self) -> None:
        """Return when it is done: the host's side may be read and written. Any thread may call this."""
        self._work.join()


class HostBoundary(ABC):
    """The boundary of one rank's device; its copies are entered into the ledger as the axis `host`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._holders: list[tuple[str, Callable[[], Sequence[Tensor]]]] = []

    @abstractmethod
    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """New memory of the host, of one dimension, to and from which copies run beside computation."""

    def store(self, host: Tensor, tensor: Tensor) -> Copy:
        """Begin to copy `tensor`, as it is after what the device was given so far, to the host."""
        traffic = Traffic(host.nbytes, host.nbytes, 0)
        return self._start(STORE, tensor, host, self._ledger.begin(AXIS, STORE, traffic))

    def fetch(self, tensor: Tensor, host: Tensor) -> Copy:
        """Begin to copy memory of the host, as it is now, into `tensor`."""
        traffic = Traffic(host.nbytes, 0, host.nbytes)
        return self._start(FETCH, tensor, host, self._ledger.begin(AXIS, FETCH, traffic))

    def announce_fetch(self, tensor: Tensor, host: Tensor) -> "LateFetch":
        """Return a fetch that `start` begins, in any thread; it is entered into the ledger now."""
        move = self._ledger.begin(AXIS, FETCH, Traffic(host.nbytes, 0, host.nbytes))
        return LateFetch(self, tensor, host, move)

    def account(self, category: str, held: Callable[[], Sequence[Tensor]]) -> None:
        """Count what `held` lists as host memory of this category of the memory meter."""
        self._holders.append((category, held))

    def storages(self) -> dict[str, list[Tensor]]:
        """Return what is held in host memory now, by category."""
        found: dict[str, list[Tensor]] = {}
        for category, held in self._holders:
            found.setdefault(category, []).extend(held())
        return found

    def close(self) -> None:  # noqa: B027 (nothing to do where the host's memory is like any other)
        """Release what was taken of the host; the boundary is not used any more."""

    def _start(self, operation: str, tensor: Tensor, host: Tensor, move: Move) -> Copy:
        assert tensor.numel() == host.numel(), (tensor.shape, host.shape)
        timing = self._timing(operation)
        source, target = (tensor, host) if operation == STORE else (host, tensor)
        work = self._begin(operation, source.detach(), target.detach())
        timing.overlap(work)
        return Copy(tensor, host, work, self._ledger, move, timing)

    @abstractmethod
    def _begin(self, operation: str, source: Tensor, target: Tensor) -> CopyWork: ...

    @abstractmethod
    def _timing(self, operation: str) -> Timing: ...


@final
class LateFetch:
    """A fetch that was announced: `start` begins it."""

    def __init__(self, boundary: HostBoundary, tensor: Tensor, host: Tensor, move: Move) -> None:
        self._boundary, self._tensor, self._host, self._move = boundary, tensor, host, move

    def start(self) -> Copy:
        """Begin the copy, after what the current stream of this thread was given."""
        self._move.start = time.perf_counter()
        return self._boundary._start(FETCH, self._tensor, self._host, self._move)


@final
class PretendedBoundary(HostBoundary):
    """The boundary of a rank without a GPU."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._queues: dict[str, deque[_LateCopy]] = {STORE: deque(), FETCH: deque()}
        self._lock = threading.Lock()

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def _begin(self, operation: str, source: Tensor, target: Tensor) -> CopyWork:
        copy = _LateCopy(source, target, self._queues[operation], self._lock)
        if operation == FETCH:
            _poison(target)
        self._queues[operation].append(copy)
        return copy

    def _timing(self, operation: str) -> Timing:  # noqa: ARG002
        return HOST_TIMING


@final
class _LateCopy(CopyWork):
    """A copy that is made when it, or a later one of its queue, is waited for."""

    def __init__(
        self, source: Tensor, target: Tensor, queue: deque["_LateCopy"], lock: threading.Lock
    ) -> None:
        self._tensors: tuple[Tensor, Tensor] | None = (source, target)
        self._queue, self._lock = queue, lock
        self._done_at: float | None = None

    def wait(self) -> None:
        self.join()

    def join(self) -> None:
        with self._lock:
            while self._tensors is not None:
                self._queue[0]._make()  # it stays in the queue if that fails
                self._queue.popleft()

    def _make(self) -> None:
        assert self._tensors is not None
        source, target = self._tensors
        with torch.no_grad():
            target.copy_(source.view(target.shape))
        self._tensors, self._done_at = None, time.perf_counter()

    def done_at(self) -> float | None:
        return self._done_at

    def done(self) -> bool:
        return self._tensors is None


def _poison(tensor: Tensor) -> None:
    """Fill it with values that show a read before the copy is made."""
    with torch.no_grad():
        if tensor.dtype is torch.uint8:  # bytes of anything: not a number in every format
            tensor.fill_(255)
        else:
            tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)


@final
class CudaBoundary(HostBoundary):
    """The boundary of a CUDA device: a stream for each direction, and pinned memory.

    torch rounds pinned memory up to powers of two, and keeps it. So pieces are ordinary memory that is pinned
    in place, as long as it is held.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._device, self._clock = device, cuda_clock(device)
        self._streams = {operation: torch.cuda.Stream(device) for operation in (STORE, FETCH)}
        self._running: dict[str, deque[_StreamCopy]] = {STORE: deque(), FETCH: deque()}
        self._lock = threading.Lock()  # the thread of the step, autograd's, and that of updates on the host

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        num_bytes = size * dtype.itemsize
        # Whole pages: two pieces of memory that share one cannot both be pinned.
        memory = torch.empty(num_bytes + 2 * _PAGE, dtype=torch.uint8)
        begin = -memory.data_ptr() % _PAGE
        host = memory[begin : begin + num_bytes].view(dtype)
        if size:
            runtime: Any = torch.cuda.cudart()
            error = int(runtime.cudaHostRegister(host.data_ptr(), -(-num_bytes // _PAGE) * _PAGE, 0))
            if error:
                with suppress(RuntimeError):  # CUDA would report the error to the next kernel
                    torch.zeros(1, device=self._device)
                raise HostMemoryError(
                    f"{show_bytes(num_bytes)} of host memory could not be pinned for copies to and from the "
                    f"GPU (cudaHostRegister: error {error}); offload less, or raise the limit of locked "
                    "memory (ulimit -l)"
                )
            # A storage lives as long as any view of it, and this object as long as the storage.
            weakref.finalize(host.untyped_storage(), _unpin, host.data_ptr()).atexit = False
        return host

    def close(self) -> None:
        for operation, stream in self._streams.items():
            stream.synchronize()
            self._running[operation].clear()
        self._clock.let_go()  # copies that were not waited for

    def _begin(self, operation: str, source: Tensor, target: Tensor) -> CopyWork:
        stream, running = self._streams[operation], self._running[operation]
        with self._lock:
            # A copy holds its host memory here until it is done, also if its caller has dropped it: the
            # memory would be unpinned, and freed, under the copy.
            while running and running[0].done():
                running.popleft()
            # A store reads what was computed before; a fetch writes where something computed before may lie.
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream), torch.no_grad():
                target.copy_(source.view(target.shape), non_blocking=True)
                done = torch.cuda.Event()
                done.record(stream)
            device_side, host_side = (source, target) if operation == STORE else (target, source)
            copy = _StreamCopy(done, self._device, device_side, host_side)
            running.append(copy)
        return copy

    def _timing(self, operation: str) -> Timing:
        return EventTiming(self._clock, lambda: self._streams[operation])


def _unpin(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


@final
class _StreamCopy(CopyWork):
    """A copy on a stream of its own; `wait` lets the current stream wait for it.

    It holds both sides: memory of the device until its caller waits, who may then use it again, and memory of
    the host until the copy is done. So a copy that is never waited for is safe too.
    """

    def __init__(self, done: torch.cuda.Event, device: torch.device, on_device: Tensor, host: Tensor) -> None:
        self._done, self._device = done, device
        self._on_device: Tensor | None = on_device
        self._host = host

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)
        # From here on the allocator may reuse it: what this stream is given next runs after the copy.
        self._on_device = None

    def join(self) -> None:
        self._done.synchronize()

    def done(self) -> bool:
        return bool(self._done.query())


def make_boundary(device: torch.device, ledger: Ledger) -> HostBoundary:
    """Return the boundary of a device: a real one for CUDA, else a pretended one."""
    return CudaBoundary(device, ledger) if device.type == "cuda" else PretendedBoundary(ledger)
