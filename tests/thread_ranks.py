"""Ranks that are threads of this process: real exchanges, in milliseconds, for tests of single strategies."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from echelon.collectives import Group, Ledger
from echelon.collectives.group import COMBINE, Reduction, Work
from echelon.collectives.recording_group import CompletedWork
from tests.groups import PartialGroup

T = TypeVar("T")
_LONGEST = 300.0  # seconds: only a test that hangs waits so long


@final
class Exchange:
    """Where the ranks of one group meet: each leaves something, and takes what all have left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_LONGEST)
        self._left: list[Any] = [None] * size

    def meet(self, rank: int, value: Any) -> list[Any]:
        self._left[rank] = value
        self.barrier.wait()
        taken = list(self._left)
        self.barrier.wait()
        return taken


@final
class ThreadGroup(PartialGroup):
    """One of the threads. Operations check that all ranks call the same one; they are complete at once."""

    def __init__(self, exchange: Exchange, rank: int, axis: str = "data") -> None:
        super().__init__(axis, rank, exchange.size, Ledger())
        self._exchange = exchange

    @property
    def subjects(self) -> list[str]:
        """What each operation of this step was about, in order."""
        return [move.subject for move in self.ledger.moves]

    def _all(self, operation: str, value: Tensor | None) -> list[Any]:
        copied = None if value is None else value.detach().clone()
        called, values = zip(*self._exchange.meet(self.rank, (operation, copied)), strict=True)
        assert set(called) == {operation}, called
        return list(values)

    def _reduced(self, operation: str, tensor: Tensor, op: Reduction) -> Tensor:
        values = self._all(f"{operation} {op}", tensor)
        result = values[0].clone()
        for value in values[1:]:
            result = COMBINE[op](result, value)
        return result / self.size if op == "mean" else result

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return _copied(tensor, self._reduced("all_reduce", tensor, op))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:
        whole = self._reduced("reduce_scatter", tensor, op)
        return _copied(output, whole.view(self.size, -1)[self.rank])

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return _copied(output, torch.cat([part.reshape(-1) for part in self._all("all_gather", tensor)]))

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Work:
        parts = [part.contiguous() for part in tensor.detach().clone().split(input_rows)]
        received = [sent[self.rank] for sent in self._exchange.meet(self.rank, parts)]
        assert [len(part) for part in received] == output_rows
        return _copied(output, torch.cat([part.reshape(-1) for part in received]))

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        return _copied(tensor, self._all(f"broadcast {source}", tensor)[source])

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Work:
        whole = self._reduced(f"reduce {target}", tensor, op)
        return _copied(tensor, whole) if self.rank == target else CompletedWork()

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Work:
        whole = self._all(f"scatter {source}", tensor)[source]
        return _copied(output, whole.view(self.size, -1)[self.rank])

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Work:
        parts = self._all(f"gather {target}", tensor)
        if output is not None:
            _copied(output, torch.cat([part.reshape(-1) for part in parts]))
        return CompletedWork()

    def _barrier(self) -> Work:
        self._all("barrier", None)
        return CompletedWork()


@torch.no_grad()
def _copied(target: Tensor, source: Tensor) -> Work:
    target.view(-1).copy_(source.reshape(-1))
    return CompletedWork()


def run_threads(size: int, fn: Callable[[Group], T]) -> list[T]:
    """What `fn` returns for each of `size` ranks. One that fails ends the waits of the others."""
    exchange = Exchange(size)

    def run(rank: int) -> T:
        try:
            return fn(ThreadGroup(exchange, rank))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as executor:
        futures = [executor.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
