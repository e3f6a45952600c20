"""What each operation does, as coroutines over a Link: directly where that is possible and pays, else staged.

The size decides, and it is the same on all ranks. Sums are taken in rank order either way: the same bits on
every rank and in every run.
"""

from typing import Protocol

from torch import Tensor

from echelon.collectives.group import Reduction
from echelon.collectives.shared import direct, staged
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.memory import bytes_of, plain
from echelon.collectives.shared.slots import LANE

_DIRECT_BYTES = 1 << 17  # below, the additional waits of the direct way cost more than the copy it saves
_DIRECT_SEND_BYTES = LANE.free_bytes  # what fits a lane is sent without waiting for the target


class _Way(Protocol):
    """What both ways can do."""

    async def all_reduce(self, link: Link, flat: Tensor, op: Reduction) -> None: ...
    async def reduce_scatter(self, link: Link, results: Tensor, whole: Tensor, op: Reduction) -> None: ...
    async def all_gather(self, link: Link, whole: Tensor, mine: Tensor) -> None: ...
    async def broadcast(self, link: Link, flat: Tensor, source: int) -> None: ...
    async def send(self, link: Link, flat: Tensor, target: int) -> None: ...
    async def recv(self, link: Link, flat: Tensor, source: int) -> None: ...


def _way(link: Link, tensor: Tensor, up_to: int = _DIRECT_BYTES) -> _Way:
    return direct if link.can_read and bytes_of(tensor) > up_to else staged


async def all_reduce(link: Link, tensor: Tensor, op: Reduction) -> None:
    await _way(link, tensor).all_reduce(link, plain(tensor), op)


async def reduce_scatter(link: Link, output: Tensor, tensor: Tensor, op: Reduction) -> None:
    await _way(link, tensor).reduce_scatter(link, plain(output), plain(tensor), op)


async def all_gather(link: Link, output: Tensor, tensor: Tensor) -> None:
    whole, mine = plain(output), plain(tensor)
    place = whole.view(link.size, -1)[link.rank]
    if place.data_ptr() != mine.data_ptr():
        place.copy_(mine)
    await _way(link, output).all_gather(link, whole, mine)


async def broadcast(link: Link, tensor: Tensor, source: int) -> None:
    await _way(link, tensor).broadcast(link, plain(tensor), source)


async def send(link: Link, tensor: Tensor, target: int) -> None:
    await _way(link, tensor, _DIRECT_SEND_BYTES).send(link, plain(tensor), target)


async def recv(link: Link, tensor: Tensor, source: int) -> None:
    await _way(link, tensor, _DIRECT_SEND_BYTES).recv(link, plain(tensor), source)
