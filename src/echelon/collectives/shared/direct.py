"""Operations on large tensors that each rank reads where the others have them: one copy, nothing staged.

Everyone tells where its tensor is, reads what it needs of the others', and returns when all have read its
own. Possible where the system lets ranks read each other's memory.
"""

from torch import Tensor

from echelon.collectives.group import Reduction
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.memory import Span, combine
from echelon.collectives.shared.slots import Inbox, Label, Operation, Pause, all_written

_CHUNK_BYTES = 1 << 19  # what is read and then added stays in the cache in between


async def all_reduce(link: Link, flat: Tensor, op: Reduction) -> None:
    """Each reduces its part for all; then each reads the others' parts.

    Whoever tells that its part is reduced has read all it needs of the others', which may then be
    overwritten.
    """
    parts = flat.tensor_split(link.size)
    starts = [part.data_ptr() - flat.data_ptr() for part in parts]
    span = Span.of(flat)
    label = Label.of(Operation.ALL_REDUCE, span, link.collectives.number, op=op, at=span)
    places = await _tell_all(link, label)
    _release(link, urgent=False)
    _reduce(link, places, starts[link.rank], parts[link.rank], parts[link.rank], op)
    await _tell_all(link, label)
    for rank, address in places.items():
        link.read(rank, address + starts[rank], parts[rank].data_ptr(), parts[rank].nbytes)
    _release(link, urgent=True)
    await link.outbox.all_read()


async def reduce_scatter(link: Link, results: Tensor, whole: Tensor, op: Reduction) -> None:
    mine = whole.view(link.size, -1)[link.rank]
    span = Span.of(whole)
    label = Label.of(Operation.REDUCE_SCATTER, span, link.collectives.number, op=op, at=span)
    places = await _tell_all(link, label)
    _reduce(link, places, mine.data_ptr() - whole.data_ptr(), mine, results, op)
    _release(link, urgent=True)
    await link.outbox.all_read()


async def all_gather(link: Link, whole: Span, mine: Span) -> None:
    label = Label.of(Operation.ALL_GATHER, whole, link.collectives.number, at=mine)
    places = await _tell_all(link, label)
    for rank, address in places.items():
        link.read(rank, address, whole.address + rank * mine.length, mine.length)
    _release(link, urgent=True)
    await link.outbox.all_read()


async def broadcast(link: Link, span: Span, source: int) -> None:
    label = Label.of(Operation.BROADCAST, span, link.collectives.number, source=source, at=span)
    if source == link.rank:
        await link.outbox.slot()
        link.outbox.publish(label)
        await link.outbox.all_read()
    else:
        await _read(link, link.inboxes[source], source, span, label)


async def send(link: Link, span: Span, target: int) -> None:
    """Complete when the target has read it."""
    lane = link.lanes_out[target]
    await lane.slot()
    lane.publish(Label.of(Operation.SEND, span, link.sends[target].number, at=span))
    await lane.all_read(Pause.AT_LEISURE)


async def recv(link: Link, span: Span, source: int) -> None:
    label = Label.of(Operation.SEND, span, link.receives[source].number, at=span)
    await _read(link, link.lanes_in[source], source, span, label)


async def _read(link: Link, inbox: Inbox, source: int, span: Span, label: Label) -> None:
    await all_written([inbox], label)
    link.read(source, inbox.address(), span.address, span.length)
    inbox.release(urgent=True)


async def _tell_all(link: Link, label: Label) -> dict[int, int]:
    """Tell the others where this rank's tensor is; where theirs are, by rank."""
    await link.outbox.slot()
    link.outbox.publish(label)
    await all_written(link.inboxes.values(), label)
    return {rank: inbox.address() for rank, inbox in link.inboxes.items()}


def _release(link: Link, *, urgent: bool) -> None:
    for inbox in link.inboxes.values():
        inbox.release(urgent=urgent)


def _reduce(
    link: Link, places: dict[int, int], start: int, mine: Tensor, output: Tensor, op: Reduction
) -> None:
    """Reduce everyone's part, which lies `start` bytes into its tensor, into `output`."""
    elements = _CHUNK_BYTES // mine.element_size()
    for index, (part, result) in enumerate(zip(mine.split(elements), output.split(elements), strict=True)):
        offset = start + index * _CHUNK_BYTES

        def fetch(rank: int, room: Tensor, part: Tensor = part, offset: int = offset) -> Tensor:
            if rank == link.rank:
                return part
            link.read(rank, places[rank] + offset, room.data_ptr(), room.nbytes)
            return room

        combine(fetch, link.size, result, op, link.scratch)
