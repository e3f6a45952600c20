"""Records passes as CUDA graphs, replays them, and measures how long the device takes.

What is recorded runs on no device: kernels are written down with the addresses of their tensors. Those that
the passes make come from memory of the recording, which lives as long as it does; the next replay writes
into the same.
"""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar, final

import torch
from torch import Tensor, nn

from echelon.memory.meter import free_bytes
from echelon.update.numbers import RankNumbers, Tally

T = TypeVar("T")
NumbersOf = Callable[[Tally], RankNumbers | None]

_SYNCHRONIZES = "called a synchronizing CUDA operation"


class Recorded(NamedTuple):
    """What passes leave: the tally of their losses, the gradient of each parameter, and the numbers of the
    update, where they follow from these."""

    tally: Tally
    gradients: list[Tensor | None]
    numbers: RankNumbers | None = None


class Recording(Protocol):
    """Passes that can run again. Each run writes into the same `outputs`."""

    outputs: Recorded

    def replay(self) -> None: ...


class Timing(Protocol):
    """How long something took: the host to ask for it, and the device from its begin to its end."""

    host_seconds: float

    def device_seconds(self) -> float | None:
        """Return None where the device is still at it."""
        ...


class Recorder(Protocol):
    """Makes recordings, and measures."""

    def record(
        self, run: Callable[[], Tally], parameters: Sequence[nn.Parameter], numbers_of: NumbersOf
    ) -> Recording:
        """Write down what `run` does with no gradients there, and then `numbers_of`; nothing happens to
        weights and buffers."""
        ...

    def has_room(self) -> bool:
        """Return whether what passes need fits twice: for the recording, and for passes as they are."""
        ...

    def timed(self, run: Callable[[], T]) -> tuple[T, Timing]: ...

    def now(self) -> float:
        """Return the seconds of the host's clock."""
        ...

    def waits(self, run: Callable[[], T]) -> tuple[T, bool]:
        """Run, and say whether the host waited for the device."""
        ...


@final
class CudaRecording:
    """A graph, and the tensors that it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Recorded) -> None:
        self._graph, self.outputs = graph, outputs

    def replay(self) -> None:
        self._graph.replay()


@final
class CudaRecorder:
    """Of one device. Recordings share their memory: they run one after the other."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(
        self, run: Callable[[], Tally], parameters: Sequence[nn.Parameter], numbers_of: NumbersOf
    ) -> Recording:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # Loaders pin memory in other threads: only what this one does may spoil the recording.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                tally = run()
                gradients = [parameter.grad for parameter in parameters]
                outputs = Recorded(tally, gradients, numbers_of(tally))
        except BaseException:
            self._pool = None
            _end_failed_capture()
            raise
        return CudaRecording(graph, outputs)

    def has_room(self) -> bool:
        needed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        return free_bytes(torch.device("cuda")) >= 2 * needed

    now = staticmethod(time.perf_counter)

    def timed(self, run: Callable[[], T]) -> tuple[T, Timing]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - start
        end.record()
        return result, CudaTiming(seconds, begin, end)

    def waits(self, run: Callable[[], T]) -> tuple[T, bool]:
        with _noted_waits() as noted:
            result = run()
        return result, bool(noted)


@final
class CudaTiming:
    """Two events around what was measured."""

    def __init__(self, host_seconds: float, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self.host_seconds, self._begin, self._end = host_seconds, begin, end

    def device_seconds(self) -> float | None:
        return self._begin.elapsed_time(self._end) / 1e3 if self._end.query() else None


@contextmanager
def _noted_waits() -> Iterator[list[str]]:
    """List the waits of the host for the device inside; other warnings are given at the end."""
    before, noted = torch.cuda.get_sync_debug_mode(), list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield noted
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        if _SYNCHRONIZES in str(each.message):
            noted.append(str(each.message))
        elif "Synchronization debug mode is a prototype" not in str(each.message):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _end_failed_capture() -> None:
    """Make torch's generators and allocator forget a recording that has failed: a small one that ends well
    puts back what the other has left half done."""
    gc.collect()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros((), device="cuda")
