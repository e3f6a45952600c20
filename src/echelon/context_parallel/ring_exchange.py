"""Messages around a ring of ranks: each rank sends to the next one and receives from the one before."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.collectives import Group, Handle


class Exchange(NamedTuple):
    """A tensor on its way to the next rank, and one on its way here."""

    outgoing: Tensor  # kept alive until it is sent
    incoming: Tensor
    handles: tuple[Handle, Handle]

    def wait(self) -> Tensor:
        """The tensor of the rank before."""
        for handle in self.handles:
            handle.wait()
        return self.incoming


def start_exchange(group: Group, tensor: Tensor) -> Exchange:
    """Start to send `tensor` to the next rank, and to receive one of the same shape from the rank before.

    Odd ranks receive first. Where the messages of a rank run one after the other (NCCL), all ranks would
    otherwise wait for a receiver forever.
    """
    incoming = torch.empty_like(tensor)
    with group.ledger.about("context"):
        if group.rank % 2:
            receiving = _receive(group, incoming)
            sending = _send(group, tensor)
        else:
            sending = _send(group, tensor)
            receiving = _receive(group, incoming)
    return Exchange(tensor, incoming, (sending, receiving))


def rounds(group: Group, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(source, tensor) of every rank in turn: first this rank's own, then that of the rank before, …

    The next tensor travels while one is used, so the caller must not change it.
    """
    for step in range(group.size):
        exchange = start_exchange(group, tensor) if step < group.size - 1 else None
        yield (group.rank - step) % group.size, tensor
        if exchange is not None:
            tensor = exchange.wait()


def _send(group: Group, tensor: Tensor) -> Handle:
    return group.send(tensor, (group.rank + 1) % group.size, wait=False)


def _receive(group: Group, tensor: Tensor) -> Handle:
    return group.recv(tensor, (group.rank - 1) % group.size, wait=False)
