"""What each operation does, as coroutines over a Link: directly where that is possible and pays, else staged.

The size decides, and it is the same on all ranks. The memory is looked up by the call, on the caller's
thread: what becomes of the Tensor object afterwards changes nothing. Sums are taken in rank order either way:
the same bits on every rank and in every run.
"""

from typing import Protocol

from torch import Tensor

from echelon.collectives.group import Reduction
from echelon.collectives.shared import direct, staged
from echelon.collectives.shared.link import Link, Steps
from echelon.collectives.shared.memory import bytes_of, plain
from echelon.collectives.shared.slots import LANE

_DIRECT_BYTES = 1 << 17  # below, the additional waits of the direct way cost more than the copy it saves
_DIRECT_SEND_BYTES = LANE.free_bytes  # what fits a lane is sent without waiting for the target


class _Way(Protocol):
    """What both ways can do."""

    def all_reduce(self, link: Link, flat: Tensor, op: Reduction) -> Steps: ...
    def reduce_scatter(self, link: Link, results: Tensor, whole: Tensor, op: Reduction) -> Steps: ...
    def all_gather(self, link: Link, whole: Tensor, mine: Tensor) -> Steps: ...
    def broadcast(self, link: Link, flat: Tensor, source: int) -> Steps: ...
    def send(self, link: Link, flat: Tensor, target: int) -> Steps: ...
    def recv(self, link: Link, flat: Tensor, source: int) -> Steps: ...


def _way(link: Link, tensor: Tensor, up_to: int = _DIRECT_BYTES) -> _Way:
    return direct if link.can_read and bytes_of(tensor) > up_to else staged


def all_reduce(link: Link, tensor: Tensor, op: Reduction) -> Steps:
    return _way(link, tensor).all_reduce(link, plain(tensor), op)


def reduce_scatter(link: Link, output: Tensor, tensor: Tensor, op: Reduction) -> Steps:
    return _way(link, tensor).reduce_scatter(link, plain(output), plain(tensor), op)


def all_gather(link: Link, output: Tensor, tensor: Tensor) -> Steps:
    return _all_gather(_way(link, output), link, plain(output), plain(tensor))


async def _all_gather(way: _Way, link: Link, whole: Tensor, mine: Tensor) -> None:
    place = whole.view(link.size, -1)[link.rank]
    if place.data_ptr() != mine.data_ptr():
        place.copy_(mine)
    await way.all_gather(link, whole, mine)


def broadcast(link: Link, tensor: Tensor, source: int) -> Steps:
    return _way(link, tensor).broadcast(link, plain(tensor), source)


def send(link: Link, tensor: Tensor, target: int) -> Steps:
    return _way(link, tensor, _DIRECT_SEND_BYTES).send(link, plain(tensor), target)


def recv(link: Link, tensor: Tensor, source: int) -> Steps:
    return _way(link, tensor, _DIRECT_SEND_BYTES).recv(link, plain(tensor), source)
