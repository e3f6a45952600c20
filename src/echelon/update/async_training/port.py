"""A worker's way to the server: direct where both are one process, by messages elsewhere.

Used by the main thread of a rank alone. What the calls mean is in server.py.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives import Ledger
from echelon.launching import PeerLost, enter_operation, leave_operation
from echelon.update.async_training.messages import (
    Kind,
    Message,
    channel,
    recv_message,
    recv_tensors,
    send_message,
    send_tensors,
    unpack_log,
)
from echelon.update.async_training.server import Gradient, PushResult, Server, ServerFailed
from echelon.update.update import Push

SERVER = 0  # the replica whose process the server lives in


class Port(ABC):
    """What one worker can ask of the server."""

    @abstractmethod
    def pull(self, step: int, into: Sequence[Tensor]) -> int: ...

    @abstractmethod
    def push(self, step: int, gradient: Gradient) -> PushResult: ...

    @abstractmethod
    def synchronize(self, into: Sequence[Tensor]) -> int: ...

    @abstractmethod
    def log(self, version: int) -> list[Push]: ...

    @abstractmethod
    def leave(self) -> None:
        """Say goodbye; may be called twice."""


@final
class LocalPort(Port):
    """The worker that lives beside the server."""

    def __init__(self, server: Server, ledger: Ledger) -> None:
        self._server, self._ledger = server, ledger

    def pull(self, step: int, into: Sequence[Tensor]) -> int:
        with self._asking("pull"):
            return self._server.pull(SERVER, step, into)

    def push(self, step: int, gradient: Gradient) -> PushResult:
        with self._asking("push"):
            return self._server.push(SERVER, step, gradient)

    def synchronize(self, into: Sequence[Tensor]) -> int:
        with self._asking("synchronize"):
            return self._server.synchronize(SERVER, into)

    def log(self, version: int) -> list[Push]:
        return self._server.log(version)

    def leave(self) -> None:
        self._server.leave(SERVER)

    @contextmanager
    def _asking(self, operation: str) -> Iterator[None]:
        """The server may make this rank wait for others, which is a sign of life and has a name."""
        enter_operation(f"{operation} data")
        try:
            yield
        finally:
            leave_operation()
            self._server.drain(self._ledger)


@final
class RemotePort(Port):
    """A worker in another process than the server."""

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger) -> None:
        self._group = channel(group, ledger)
        self._open = True

    def pull(self, step: int, into: Sequence[Tensor]) -> int:
        return self._ask_weights(Message(Kind.PULL, step), into)

    def push(self, step: int, gradient: Gradient) -> PushResult:
        request = Message(Kind.PUSH, step, gradient.total, gradient.count, gradient.factor)
        send_message(self._group, request, SERVER)
        buffers = [gradient.used, *(bucket.buffer for bucket in gradient.buckets)]
        send_tensors(self._group, buffers, SERVER, "gradients")
        return PushResult(*self._reply()[1:])

    def synchronize(self, into: Sequence[Tensor]) -> int:
        return self._ask_weights(Message(Kind.SYNCHRONIZE), into)

    def log(self, version: int) -> list[Push]:
        send_message(self._group, Message(Kind.LOG, version), SERVER)
        rows = torch.empty(self._reply().number, len(Push._fields), dtype=torch.int64)
        recv_tensors(self._group, [rows], SERVER, "log")
        return unpack_log(rows)

    def leave(self) -> None:
        if self._open:
            self._open = False
            with contextlib.suppress(Exception):  # server and process group may have ended first
                send_message(self._group, Message(Kind.GOODBYE), SERVER)

    def _ask_weights(self, request: Message, into: Sequence[Tensor]) -> int:
        send_message(self._group, request, SERVER)
        version = self._reply().number
        recv_tensors(self._group, into, SERVER, "parameters")
        return version

    def _reply(self) -> Message:
        reply = recv_message(self._group, SERVER)
        if reply.kind == Kind.DONE:
            return reply
        text = torch.empty(reply.number, dtype=torch.uint8)
        recv_tensors(self._group, [text], SERVER, "requests")
        self._open = False  # the server listens no more
        said = bytes(text.tolist()).decode()
        raise PeerLost(said) if reply.kind == Kind.LOST else ServerFailed(f"on replica {SERVER}: {said}")
