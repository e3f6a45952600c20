"""Operations through slots, in pieces of which each fits one: two copies, and possible everywhere.

Every rank writes its piece into its own ring and reads the others'; a few pieces are written ahead, so that
ranks rarely wait for each other.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from echelon.collectives.group import Reduction
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.memory import bytes_of, combine, fit, pieces_of
from echelon.collectives.shared.slots import COLLECTIVE, LANE, Inbox, Label, Operation, all_written

_AHEAD = COLLECTIVE.slots // 2  # pieces written before the first of them is read
_AT_ONCE_BYTES = 1 << 15  # up to here everyone adds everything up, which needs one wait instead of two

Write = Callable[[int, Tensor], None]  # piece number n into a slot
Read = Callable[[int, Mapping[int, Tensor]], None]  # piece number n from the slots of the others, by rank


async def all_reduce(link: Link, flat: Tensor, op: Reduction) -> None:
    """Everyone adds up everything, or its part for all: what costs less.

    Of two ranks each writes the buffer once and adds it once. By parts it would be as many passes over
    memory (half written, half added, half written again, half read), and two waits instead of one.
    """
    if link.size == 2 or bytes_of(flat) <= _AT_ONCE_BYTES:
        await _all_reduce_at_once(link, flat, op)
    else:
        await _all_reduce_by_parts(link, flat, op)


async def _all_reduce_at_once(link: Link, flat: Tensor, op: Reduction) -> None:
    pieces = flat.split(COLLECTIVE.slot_bytes // flat.element_size())

    def write(index: int, slot: Tensor) -> None:
        fit(slot, pieces[index]).copy_(pieces[index])

    def read(index: int, slots: Mapping[int, Tensor]) -> None:
        mine = pieces[index]
        _combine(link, {rank: fit(slot, mine) for rank, slot in slots.items()}, mine, mine, op)

    label = Label.of(Operation.ALL_REDUCE, flat, link.collectives.number, op=op)
    await _together(link, label, len(pieces), write, read)


async def _all_reduce_by_parts(link: Link, flat: Tensor, op: Reduction) -> None:
    """Each piece in two turns: everyone's parts for the others, then everyone's part of the result."""
    room = _room(link, flat)
    pieces = [piece.tensor_split(link.size) for piece in flat.split(room * link.size)]

    def write(turn: int, slot: Tensor) -> None:
        index, result = divmod(turn, 2)
        if result:
            fit(slot, pieces[index][link.rank]).copy_(pieces[index][link.rank])
        else:
            _write_parts(link, pieces[index], slot, room)

    def read(turn: int, slots: Mapping[int, Tensor]) -> None:
        index, result = divmod(turn, 2)
        mine = pieces[index][link.rank]
        if not result:
            _combine(link, _parts_for_me(link, slots, mine, room), mine, mine, op)
            return
        for rank, slot in slots.items():
            pieces[index][rank].copy_(fit(slot, pieces[index][rank]))

    # A result cannot be written before its parts are read: nothing goes ahead.
    label = Label.of(Operation.ALL_REDUCE, flat, link.collectives.number, op=op)
    await _together(link, label, 2 * len(pieces), write, read, ahead=1)


async def reduce_scatter(link: Link, results: Tensor, whole: Tensor, op: Reduction) -> None:
    """Everyone writes the parts for the others, and adds up what came for itself."""
    room = _room(link, whole)
    pieces = list(zip(*(part.split(room) for part in whole.view(link.size, -1)), strict=True))
    outputs = results.split(room)

    def write(index: int, slot: Tensor) -> None:
        _write_parts(link, pieces[index], slot, room)

    def read(index: int, slots: Mapping[int, Tensor]) -> None:
        mine = pieces[index][link.rank]
        _combine(link, _parts_for_me(link, slots, mine, room), mine, outputs[index], op)

    label = Label.of(Operation.REDUCE_SCATTER, whole, link.collectives.number, op=op)
    await _together(link, label, len(pieces), write, read)


async def all_gather(link: Link, whole: Tensor, mine: Tensor) -> None:
    """Everyone writes its own, and copies the others' to their places."""
    pieces = mine.view(torch.uint8).split(COLLECTIVE.slot_bytes)
    places = [part.split(COLLECTIVE.slot_bytes) for part in whole.view(torch.uint8).view(link.size, -1)]

    def write(index: int, slot: Tensor) -> None:
        fit(slot, pieces[index]).copy_(pieces[index])

    def read(index: int, slots: Mapping[int, Tensor]) -> None:
        for rank, slot in slots.items():
            places[rank][index].copy_(fit(slot, places[rank][index]))

    label = Label.of(Operation.ALL_GATHER, whole, link.collectives.number)
    await _together(link, label, len(pieces), write, read)


async def broadcast(link: Link, flat: Tensor, source: int) -> None:
    """The source writes, the others read."""
    label = Label.of(Operation.BROADCAST, flat, link.collectives.number, source=source)
    for piece in pieces_of(flat, COLLECTIVE.slot_bytes):
        if source == link.rank:
            fit(await link.outbox.slot(), piece).copy_(piece)
            link.outbox.publish(label)
        else:
            await _read(link.inboxes[source], piece, label)


async def send(link: Link, flat: Tensor, target: int) -> None:
    """Complete when all is written: while the lane has room, the target need not be there."""
    label = Label.of(Operation.SEND, flat, link.sends[target].number)
    for piece in pieces_of(flat, LANE.slot_bytes):
        fit(await link.lanes_out[target].slot(), piece).copy_(piece)
        link.lanes_out[target].publish(label)


async def recv(link: Link, flat: Tensor, source: int) -> None:
    label = Label.of(Operation.SEND, flat, link.receives[source].number)
    for piece in pieces_of(flat, LANE.slot_bytes):
        await _read(link.lanes_in[source], piece, label)


async def _read(inbox: Inbox, piece: Tensor, label: Label) -> None:
    await all_written([inbox], label)
    piece.copy_(fit(inbox.slot(), piece))
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


def _write_parts(link: Link, parts: Sequence[Tensor], slot: Tensor, room: int) -> None:
    for rank, part in enumerate(parts):
        if rank != link.rank:
            fit(slot, part, room * (rank - (rank > link.rank))).copy_(part)


def _parts_for_me(link: Link, slots: Mapping[int, Tensor], mine: Tensor, room: int) -> dict[int, Tensor]:
    return {rank: fit(slot, mine, room * (link.rank - (link.rank > rank))) for rank, slot in slots.items()}


def _combine(link: Link, theirs: Mapping[int, Tensor], mine: Tensor, output: Tensor, op: Reduction) -> None:
    combine(lambda rank, _: theirs.get(rank, mine), link.size, output, op, link.scratch)
