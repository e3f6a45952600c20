"""What each operation does, as coroutines over a Link: directly where that is possible and pays, else staged.

The size decides, and it is the same on all ranks. The memory is looked up by the call, on the caller's
thread: what becomes of the Tensor object afterwards changes nothing. Sums are taken in rank order either way:
the same bits on every rank and in every run.
"""

from typing import Protocol

from torch import Tensor

from echelon.collectives.group import Reduction
from echelon.collectives.shared import direct, staged
from echelon.collectives.shared.lines import Steps
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.memory import Span, plain
from echelon.collectives.shared.slots import LANE

_DIRECT_BYTES = 1 << 17  # below, the additional waits of the direct way cost more than the copy it saves
_DIRECT_SUM_OF_TWO_BYTES = 1 << 21  # of two ranks an all-reduce through slots has one wait, directly three
_DIRECT_SEND_BYTES = LANE.free_bytes  # what fits a lane is sent without waiting for the target


class _Way(Protocol):
    """What both ways can do."""

    def all_reduce(self, link: Link, flat: Tensor, op: Reduction) -> Steps: ...
    def reduce_scatter(self, link: Link, results: Tensor, whole: Tensor, op: Reduction) -> Steps: ...
    def all_gather(self, link: Link, whole: Span, mine: Span) -> Steps: ...
    def broadcast(self, link: Link, span: Span, source: int) -> Steps: ...
    def send(self, link: Link, span: Span, target: int) -> Steps: ...
    def recv(self, link: Link, span: Span, source: int) -> Steps: ...


def _way(link: Link, tensor: Tensor, up_to: int = _DIRECT_BYTES) -> _Way:
    return direct if link.can_read and tensor.nbytes > up_to else staged


def _aside(way: _Way, tensor: Tensor) -> bool:
    """Whether peers would have to read what they cannot: memory pinned for a device. A copy they can."""
    return way is direct and tensor.is_pinned()


def all_reduce(link: Link, tensor: Tensor, op: Reduction) -> Steps:
    up_to = _DIRECT_SUM_OF_TWO_BYTES if link.size == 2 else _DIRECT_BYTES
    way, flat = _way(link, tensor, up_to), plain(tensor)
    return _all_reduce_aside(way, link, flat, op) if _aside(way, tensor) else way.all_reduce(link, flat, op)


async def _all_reduce_aside(way: _Way, link: Link, flat: Tensor, op: Reduction) -> None:
    copy = plain(flat.clone())  # whoever drives, with or without inference mode
    await way.all_reduce(link, copy, op)
    flat.copy_(copy)


def reduce_scatter(link: Link, output: Tensor, tensor: Tensor, op: Reduction) -> Steps:
    way, whole = _way(link, tensor), plain(tensor)
    return way.reduce_scatter(link, plain(output), plain(whole.clone()) if _aside(way, tensor) else whole, op)


def all_gather(link: Link, output: Tensor, tensor: Tensor) -> Steps:
    way, mine = _way(link, output), Span.of(tensor)
    return _all_gather(way, link, Span.of(output), mine, _readable(way, tensor))


async def _all_gather(way: _Way, link: Link, whole: Span, mine: Span, readable: Span) -> None:
    place = whole.address + link.rank * mine.length
    if place != mine.address:
        mine.copy_to(place)
    await way.all_gather(link, whole, readable)


def broadcast(link: Link, tensor: Tensor, source: int) -> Steps:
    way = _way(link, tensor)
    span = _readable(way, tensor) if source == link.rank else Span.of(tensor)
    return way.broadcast(link, span, source)


def send(link: Link, tensor: Tensor, target: int) -> Steps:
    way = _way(link, tensor, _DIRECT_SEND_BYTES)
    return way.send(link, _readable(way, tensor), target)


def recv(link: Link, tensor: Tensor, source: int) -> Steps:
    return _way(link, tensor, _DIRECT_SEND_BYTES).recv(link, Span.of(tensor), source)


def _readable(way: _Way, tensor: Tensor) -> Span:
    return Span.of(tensor.clone() if _aside(way, tensor) else tensor)
