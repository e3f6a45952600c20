"""Operations on large tensors that each rank reads where the others have them: one copy, nothing staged.

Everyone tells where its tensor is, reads what it needs of the others', and returns when all have read its
own. Possible where the system lets ranks read each other's memory.
"""

from torch import Tensor

from echelon.collectives.group import Reduction
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.memory import bytes_of, combine
from echelon.collectives.shared.slots import Label, Operation

_CHUNK_BYTES = 1 << 19  # what is read and then added stays in the cache in between


async def all_reduce(link: Link, flat: Tensor, op: Reduction) -> None:
    """Each reduces its part for all; then each reads the others' parts.

    Whoever tells that its part is reduced has read all it needs of the others', which may then be
    overwritten.
    """
    parts = flat.tensor_split(link.size)
    starts = [part.data_ptr() - flat.data_ptr() for part in parts]
    label = Label(Operation.ALL_REDUCE, bytes_of(flat), flat.data_ptr())
    places = await _tell_all(link, label)
    _release(link, urgent=False)
    _reduce(link, places, starts[link.rank], parts[link.rank], parts[link.rank], op)
    await _tell_all(link, label)
    for rank, address in places.items():
        link.read(rank, address + starts[rank], parts[rank])
    _release(link, urgent=True)
    await link.outbox.all_read()


async def reduce_scatter(link: Link, results: Tensor, whole: Tensor, op: Reduction) -> None:
    mine = whole.view(link.size, -1)[link.rank]
    places = await _tell_all(link, Label(Operation.REDUCE_SCATTER, bytes_of(whole), whole.data_ptr()))
    _reduce(link, places, mine.data_ptr() - whole.data_ptr(), mine, results, op)
    _release(link, urgent=True)
    await link.outbox.all_read()


async def all_gather(link: Link, whole: Tensor, mine: Tensor) -> None:
    parts = whole.view(link.size, -1)
    places = await _tell_all(link, Label(Operation.ALL_GATHER, bytes_of(whole), mine.data_ptr()))
    for rank, address in places.items():
        link.read(rank, address, parts[rank])
    _release(link, urgent=True)
    await link.outbox.all_read()


async def broadcast(link: Link, flat: Tensor, source: int) -> None:
    label = Label(Operation.BROADCAST, bytes_of(flat), flat.data_ptr())
    if source == link.rank:
        await link.outbox.slot()
        link.outbox.publish(label)
        await link.outbox.all_read()
    else:
        link.read(source, await link.inboxes[source].address(label), flat)
        link.inboxes[source].release(urgent=True)


async def send(link: Link, flat: Tensor, target: int) -> None:
    """Complete when the target has read it."""
    lane = link.lanes_out[target]
    await lane.slot()
    lane.publish(Label(Operation.SEND, bytes_of(flat), flat.data_ptr()))
    await lane.all_read()


async def recv(link: Link, flat: Tensor, source: int) -> None:
    lane = link.lanes_in[source]
    link.read(source, await lane.address(Label(Operation.SEND, bytes_of(flat))), flat)
    lane.release(urgent=True)


async def _tell_all(link: Link, label: Label) -> dict[int, int]:
    """Tell the others where this rank's tensor is; where theirs are, by rank."""
    await link.outbox.slot()
    link.outbox.publish(label)
    return {rank: await inbox.address(label) for rank, inbox in link.inboxes.items()}


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
            link.read(rank, places[rank] + offset, room)
            return room

        combine(fetch, link.size, result, op, link.scratch)
