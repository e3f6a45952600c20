"""Operations through slots, in pieces of which each fits one: two copies, and possible everywhere.

Every rank writes its piece into its own ring and reads the others'; a few pieces are written ahead, so that
ranks rarely wait for each other.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from echelon.collectives.group import Reduction
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.memory import Span, combine, copy, fit, pieces
from echelon.collectives.shared.slots import COLLECTIVE, LANE, Inbox, Label, Operation, Slot, all_written

_AHEAD = COLLECTIVE.slots // 2  # pieces written before the first of them is read
_AT_ONCE_BYTES = 1 << 15  # up to here everyone adds everything up, which needs one wait instead of two

Write = Callable[[int, Slot], None]  # piece number n into a slot
Read = Callable[[int, Mapping[int, Slot]], None]  # piece number n from the slots of the others, by rank


async def all_reduce(link: Link, flat: Tensor, op: Reduction) -> None:
    """Everyone adds up everything, or its part for all: what costs less.

    Of two ranks each writes the buffer once and adds it once. By parts it would be as many passes over
    memory (half written, half added, half written again, half read), and two waits instead of one.
    """
    if link.size == 2 or flat.nbytes <= _AT_ONCE_BYTES:
        await _all_reduce_at_once(link, flat, op)
    else:
        await _all_reduce_by_parts(link, flat, op)


async def _all_reduce_at_once(link: Link, flat: Tensor, op: Reduction) -> None:
    parts = pieces(flat, COLLECTIVE.slot_bytes // flat.element_size())

    def write(index: int, slot: Slot) -> None:
        copy(slot.address, parts[index].data_ptr(), parts[index].nbytes)

    def read(index: int, slots: Mapping[int, Slot]) -> None:
        mine = parts[index]
        _combine(link, {rank: fit(slot.memory, mine) for rank, slot in slots.items()}, mine, mine, op)

    label = Label.of(Operation.ALL_REDUCE, Span.of(flat), link.collectives.number, op=op)
    await _together(link, label, len(parts), write, read)


async def _all_reduce_by_parts(link: Link, flat: Tensor, op: Reduction) -> None:
    """Each piece in two turns: everyone's parts for the others, then everyone's part of the result."""
    room = _room(link, flat)
    parts = [piece.tensor_split(link.size) for piece in flat.split(room * link.size)]

    def write(turn: int, slot: Slot) -> None:
        index, result = divmod(turn, 2)
        if result:
            fit(slot.memory, parts[index][link.rank]).copy_(parts[index][link.rank])
        else:
            _write_parts(link, parts[index], slot, room)

    def read(turn: int, slots: Mapping[int, Slot]) -> None:
        index, result = divmod(turn, 2)
        mine = parts[index][link.rank]
        if not result:
            _combine(link, _parts_for_me(link, slots, mine, room), mine, mine, op)
            return
        for rank, slot in slots.items():
            parts[index][rank].copy_(fit(slot.memory, parts[index][rank]))

    # A result cannot be written before its parts are read: nothing goes ahead.
    label = Label.of(Operation.ALL_REDUCE, Span.of(flat), link.collectives.number, op=op)
    await _together(link, label, 2 * len(parts), write, read, ahead=1)


async def reduce_scatter(link: Link, results: Tensor, whole: Tensor, op: Reduction) -> None:
    """Everyone writes the parts for the others, and adds up what came for itself."""
    room = _room(link, whole)
    parts = list(zip(*(part.split(room) for part in whole.view(link.size, -1)), strict=True))
    outputs = results.split(room)

    def write(index: int, slot: Slot) -> None:
        _write_parts(link, parts[index], slot, room)

    def read(index: int, slots: Mapping[int, Slot]) -> None:
        mine = parts[index][link.rank]
        _combine(link, _parts_for_me(link, slots, mine, room), mine, outputs[index], op)

    label = Label.of(Operation.REDUCE_SCATTER, Span.of(whole), link.collectives.number, op=op)
    await _together(link, label, len(parts), write, read)


async def all_gather(link: Link, whole: Span, mine: Span) -> None:
    """Everyone writes its own, and copies the others' to their places."""
    parts = mine.pieces(COLLECTIVE.slot_bytes)
    places = [part.pieces(COLLECTIVE.slot_bytes) for part in whole.pieces(mine.length)]

    def write(index: int, slot: Slot) -> None:
        parts[index].copy_to(slot.address)

    def read(index: int, slots: Mapping[int, Slot]) -> None:
        for rank, slot in slots.items():
            places[rank][index].copy_from(slot.address)

    label = Label.of(Operation.ALL_GATHER, whole, link.collectives.number)
    await _together(link, label, len(parts), write, read)


async def broadcast(link: Link, span: Span, source: int) -> None:
    """The source writes, the others read."""
    label = Label.of(Operation.BROADCAST, span, link.collectives.number, source=source)
    for piece in span.pieces(COLLECTIVE.slot_bytes):
        if source == link.rank:
            piece.copy_to((await link.outbox.slot()).address)
            link.outbox.publish(label)
        else:
            await _read(link.inboxes[source], piece, label)


async def send(link: Link, span: Span, target: int) -> None:
    """Complete when all is written: while the lane has room, the target need not be there."""
    label = Label.of(Operation.SEND, span, link.sends[target].number)
    lane = link.lanes_out[target]
    for piece in span.pieces(LANE.slot_bytes):
        piece.copy_to((await lane.slot()).address)
        lane.publish(label)


async def recv(link: Link, span: Span, source: int) -> None:
    label = Label.of(Operation.SEND, span, link.receives[source].number)
    for piece in span.pieces(LANE.slot_bytes):
        await _read(link.lanes_in[source], piece, label)


async def _read(inbox: Inbox, piece: Span, label: Label) -> None:
    await all_written([inbox], label)
    piece.copy_from(inbox.slot().address)
    inbox.release()


async def _together(
    link: Link, label: Label, count: int, write: Write, read: Read, ahead: int = _AHEAD
) -> None:
    """Everyone writes `count` pieces, up to `ahead` before the first is read, and reads everyone's."""
    written = 0
    for index in range(count):
        while written < min(count, index + ahead):
            write(written, await link.outbox.slot())
            link.outbox.publish(label)
            written += 1
        await all_written(link.inboxes.values(), label)
        read(index, {rank: inbox.slot() for rank, inbox in link.inboxes.items()})
        for inbox in link.inboxes.values():
            inbox.release()


def _room(link: Link, tensor: Tensor) -> int:
    """Elements in a slot for each rank but the writer."""
    return COLLECTIVE.slot_bytes // tensor.element_size() // (link.size - 1)


def _write_parts(link: Link, parts: Sequence[Tensor], slot: Slot, room: int) -> None:
    for rank, part in enumerate(parts):
        if rank != link.rank:
            fit(slot.memory, part, room * (rank - (rank > link.rank))).copy_(part)


def _parts_for_me(link: Link, slots: Mapping[int, Slot], mine: Tensor, room: int) -> dict[int, Tensor]:
    return {
        rank: fit(slot.memory, mine, room * (link.rank - (link.rank > rank))) for rank, slot in slots.items()
    }


def _combine(link: Link, theirs: Mapping[int, Tensor], mine: Tensor, output: Tensor, op: Reduction) -> None:
    combine(lambda rank, _: theirs.get(rank, mine), link.size, output, op, link.scratch)
