"""A worker's way to the server: direct where both are one process, by messages elsewhere.

    worker                                  server
    PULL step                        ──▶
                                     ◀──    DONE version; weights
    PUSH step, total, count, factor;
    used, gradients                  ──▶
                                     ◀──    DONE version, total, count, norm
    SYNCHRONIZE                      ──▶
                                     ◀──    DONE version; weights
    LOG version                      ──▶
                                     ◀──    DONE number of entries; entries
    GOODBYE                          ──▶
                                     ◀──    FAILED number of bytes; what went wrong   (instead of any DONE)

A short message, then the tensors that belong to it. They go over a Gloo process group of their own, so that
they never meet the collectives of the main threads. Gloo moves host memory: what lives on a device passes
through there. Ports are used by the main thread of a rank alone. What the calls mean is in server.py.
"""

import contextlib
import enum
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives import Group, Ledger, TorchGroup
from echelon.collectives.process_groups import new_host_group
from echelon.launching import PeerLost, enter_operation, leave_operation
from echelon.update.async_training.server import Gradient, PushResult, Server, ServerFailed
from echelon.update.update import Push

_FOREVER = timedelta(days=365)  # a worker may compute as long as it likes; sockets show who is dead


class Kind(enum.IntEnum):
    PULL = 0
    PUSH = 1
    SYNCHRONIZE = 2
    LOG = 3
    GOODBYE = 4
    DONE = 5
    FAILED = 6
    LOST = 7  # FAILED, because another rank was lost


class Message(NamedTuple):
    """`number` is a step, a version or a length, as the table above says."""

    kind: Kind
    number: int = 0
    total: float = 0.0
    counted: float = 0.0
    norm_or_factor: float = 0.0


def open_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group of `ranks` for these messages alone; every rank must open the one that it is in."""
    return new_host_group(ranks, timeout=_FOREVER)


def channel(group: dist.ProcessGroup, ledger: Ledger) -> TorchGroup:
    """A way to send over `group` that counts in `ledger`, which one thread may use."""
    return TorchGroup("data", group, ledger)


def send_message(group: Group, message: Message, target: int) -> None:
    with group.ledger.about("requests"):
        group.send(torch.tensor(message, dtype=torch.float64), target)


def recv_message(group: Group, source: int) -> Message:
    values = torch.empty(len(Message._fields), dtype=torch.float64)
    with group.ledger.about("requests"):
        group.recv(values, source)
    kind, number, *numbers = values.tolist()
    return Message(Kind(int(kind)), int(number), *numbers)


def send_tensors(group: Group, tensors: Iterable[Tensor], target: int, subject: str) -> None:
    """All at once; returns when they are sent."""
    with group.ledger.about(subject):
        handles = [group.send(tensor.cpu(), target, wait=False) for tensor in tensors]
    for handle in handles:
        handle.wait()


def recv_tensors(group: Group, tensors: Iterable[Tensor], source: int, subject: str) -> None:
    """Into `tensors`, all at once; returns when they are there."""
    pairs = [
        (tensor, tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu"))
        for tensor in tensors
    ]
    with group.ledger.about(subject):
        handles = [group.recv(host, source, wait=False) for _, host in pairs]
    for handle, (tensor, host) in zip(handles, pairs, strict=True):
        handle.wait()
        if host is not tensor:
            tensor.copy_(host)


def pack_log(log: Iterable[Push]) -> Tensor:
    """The log of a training as a tensor: a row of four integers for each entry."""
    return torch.tensor(list(log), dtype=torch.int64).view(-1, len(Push._fields))


SERVER = 0  # the replica whose process the server lives in


@final
class LocalPort:
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
class RemotePort:
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
        return [Push(*row) for row in rows.tolist()]

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


Port = LocalPort | RemotePort
