"""What workers and server say to each other: a short message, then the tensors that belong to it.

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

They go over a Gloo process group of their own, so that they never meet the collectives of the main threads.
Gloo moves host memory: what lives on a device passes through there.
"""

import enum
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives import Group, Ledger, TorchGroup
from echelon.collectives.mesh.process_groups import new_host_group
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


def unpack_log(rows: Tensor) -> list[Push]:
    return [Push(*row) for row in rows.tolist()]
