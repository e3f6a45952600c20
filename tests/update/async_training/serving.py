"""A server of one weight, and workers that are threads of the same process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from echelon.collectives import Ledger
from echelon.update.async_training import host as connection
from echelon.update.async_training import port
from echelon.update.async_training.host import Connection, Host, flat_buckets
from echelon.update.async_training.port import RemotePort
from echelon.update.async_training.server import Gradient, PushResult, Server
from echelon.update.precision.stepper import DirectStepper
from tests.groups import QueueGroup, Queues


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


class _Condition(threading.Condition):
    """A condition that lets others know when a thread begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.release()
        return super().wait(timeout)


class Served:
    """A server of one weight, which starts as [0, 0], and what its workers do."""

    def __init__(self, workers: int, staleness: float, make: Any = sgd, **options: Any) -> None:
        self.parameter = nn.Parameter(torch.zeros(2))
        given = {"clip": None, "schedule": None} | options
        self.host = Host(
            [("w", self.parameter)], make, DirectStepper, workers=workers, staleness=staleness, **given
        )
        self.server: Server = self.host.server
        self._condition = self.server._changed = _Condition()
        self.pool = ThreadPoolExecutor(workers)

    def pull(self, worker: int, step: int) -> tuple[int, list[float]]:
        into = torch.empty(2)
        return self.server.pull(worker, step, [into]), into.tolist()

    def gradient(self, value: float, count: float = 1.0, used: bool = True, factor: float = 1.0) -> Gradient:
        buckets = flat_buckets([self.parameter])
        buckets[0].buffer.fill_(value)
        return Gradient(buckets, torch.tensor([used], dtype=torch.uint8), 0.0, count, factor)

    def push(
        self,
        worker: int,
        step: int,
        value: float,
        count: float = 1.0,
        used: bool = True,
        factor: float = 1.0,
    ) -> PushResult:
        return self.server.push(worker, step, self.gradient(value, count, used, factor))

    def synchronize(self, worker: int) -> tuple[int, list[float]]:
        into = torch.empty(2)
        return self.server.synchronize(worker, [into]), into.tolist()

    def later(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Begin a call that must not return yet; returns when it waits inside the server."""
        while self._condition.begun.acquire(blocking=False):
            pass
        future = self.pool.submit(call, *args)
        assert self._condition.begun.acquire(timeout=30.0)
        with self._condition:  # the lock is free only when the other thread waits
            assert not future.done()
        return future


class Remote(Served):
    """A server of which worker 1 is behind a connection, as if it were in another process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, staleness: float, **options: Any) -> None:
        super().__init__(2, staleness, **options)
        self.queues = Queues()
        for module, rank in ((connection, 0), (port, 1)):
            monkeypatch.setattr(
                module, "channel", lambda _, ledger, rank=rank: QueueGroup(self.queues, rank, 2, ledger)
            )
        group: Any = None  # which the two above stand for
        inbox = flat_buckets([self.parameter])
        self.connection = Connection(self.server, group, 1, self.host._weights, inbox)
        self.ledger = Ledger()
        self.port = RemotePort(group, self.ledger)
        self.connection.start()
