"""A ring of ranks: each passes what it has to the next, and takes what the one before it had."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.collectives import Group, Handle


class Moving(NamedTuple):
    """A tensor on its way to the next rank, and one on its way here."""

    outgoing: Tensor  # kept until it has left
    incoming: Tensor
    handles: tuple[Handle, Handle]

    def wait(self) -> Tensor:
        """What the rank before had."""
        for handle in self.handles:
            handle.wait()
        return self.incoming


def pass_on(group: Group, tensor: Tensor) -> Moving:
    """Begin to send `tensor` to the next rank and to receive the like from the one before.

    Every other rank receives first. Where the messages of a rank go one after the other (NCCL), all would
    otherwise wait for a receiver, for ever.
    """
    incoming = torch.empty_like(tensor)
    with group.ledger.about("context"):
        if group.rank % 2:
            receiving = _receive(group, incoming)
            sending = _send(group, tensor)
        else:
            sending = _send(group, tensor)
            receiving = _receive(group, incoming)
    return Moving(tensor, incoming, (sending, receiving))


def rounds(group: Group, held: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Every rank's tensor in turn, with whose it is: first ours, `held`, then that of the rank before, …

    The next one is on its way while one is used, which must not be changed.
    """
    for step in range(group.size):
        moving = pass_on(group, held) if step < group.size - 1 else None
        yield (group.rank - step) % group.size, held
        if moving is not None:
            held = moving.wait()


def _send(group: Group, tensor: Tensor) -> Handle:
    return group.send(tensor, (group.rank + 1) % group.size, wait=False)


def _receive(group: Group, tensor: Tensor) -> Handle:
    return group.recv(tensor, (group.rank - 1) % group.size, wait=False)
