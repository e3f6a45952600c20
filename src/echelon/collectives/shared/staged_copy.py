"""Operations through slots, in pieces that each fit one slot: two copies, and possible everywhere.

Every rank writes its piece into its own ring and reads the others' rings. It writes a few pieces ahead, so
that ranks rarely wait for each other.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from echelon.collectives.group import Reduction
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.slots import (
    COLLECTIVE,
    LANE,
    Header,
    OperationKind,
    RingReader,
    Slot,
    TensorMemory,
    all_written,
    copy_bytes,
    pieces,
    reduce_in_rank_order,
    view_like,
)

_NUM_AHEAD = COLLECTIVE.slots // 2  # pieces written before the first of them is read
_ONE_PASS_BYTES = 1 << 15  # up to here every rank reduces everything, which needs one wait instead of two

Write = Callable[[int, Slot], None]  # writes piece n into a slot
Read = Callable[[int, Mapping[int, Slot]], None]  # reads piece n from the slots of the others, by rank


async def all_reduce(link: Link, flat: Tensor, op: Reduction) -> None:
    """Every rank reduces everything, or one part for all, whichever is cheaper.

    Two ranks each write the buffer once and add it once. By parts they would pass over memory as often
    (half written, half added, half written again, half read), with two waits instead of one.
    """
    if link.size == 2 or flat.nbytes <= _ONE_PASS_BYTES:
        await _all_reduce_in_one_pass(link, flat, op)
    else:
        await _all_reduce_by_parts(link, flat, op)


async def _all_reduce_in_one_pass(link: Link, flat: Tensor, op: Reduction) -> None:
    parts = pieces(flat, COLLECTIVE.slot_bytes // flat.element_size())

    def write(index: int, slot: Slot) -> None:
        copy_bytes(slot.address, parts[index].data_ptr(), parts[index].nbytes)

    def read(index: int, slots: Mapping[int, Slot]) -> None:
        part = parts[index]
        others = {rank: view_like(slot.memory, part) for rank, slot in slots.items()}
        _reduce(link, others, part, part, op)

    header = Header.of(OperationKind.ALL_REDUCE, TensorMemory.of(flat), link.collectives.number, op=op)
    await _exchange_pieces(link, header, len(parts), write, read)


async def _all_reduce_by_parts(link: Link, flat: Tensor, op: Reduction) -> None:
    """Each piece takes two steps: all ranks' parts for the others, then each rank's part of the result."""
    room = _elements_per_peer(link, flat)
    parts = [piece.tensor_split(link.size) for piece in flat.split(room * link.size)]

    def write(step: int, slot: Slot) -> None:
        index, is_result = divmod(step, 2)
        own_part = parts[index][link.rank]
        if is_result:
            view_like(slot.memory, own_part).copy_(own_part)
        else:
            _write_parts(link, parts[index], slot, room)

    def read(step: int, slots: Mapping[int, Slot]) -> None:
        index, is_result = divmod(step, 2)
        own_part = parts[index][link.rank]
        if not is_result:
            _reduce(link, _parts_for_this_rank(link, slots, own_part, room), own_part, own_part, op)
            return
        for rank, slot in slots.items():
            parts[index][rank].copy_(view_like(slot.memory, parts[index][rank]))

    # A result cannot be written before its parts are read, so no piece is written ahead.
    header = Header.of(OperationKind.ALL_REDUCE, TensorMemory.of(flat), link.collectives.number, op=op)
    await _exchange_pieces(link, header, 2 * len(parts), write, read, num_ahead=1)


async def reduce_scatter(link: Link, output: Tensor, whole: Tensor, op: Reduction) -> None:
    """Every rank writes the parts for the others, and reduces the parts for itself."""
    room = _elements_per_peer(link, whole)
    parts = list(zip(*(part.split(room) for part in whole.view(link.size, -1)), strict=True))
    outputs = output.split(room)

    def write(index: int, slot: Slot) -> None:
        _write_parts(link, parts[index], slot, room)

    def read(index: int, slots: Mapping[int, Slot]) -> None:
        own_part = parts[index][link.rank]
        _reduce(link, _parts_for_this_rank(link, slots, own_part, room), own_part, outputs[index], op)

    header = Header.of(OperationKind.REDUCE_SCATTER, TensorMemory.of(whole), link.collectives.number, op=op)
    await _exchange_pieces(link, header, len(parts), write, read)


async def all_gather(link: Link, whole: TensorMemory, own_part: TensorMemory) -> None:
    """Every rank writes its own part, and copies the others' parts to their places."""
    own_pieces = own_part.pieces(COLLECTIVE.slot_bytes)
    destinations = [part.pieces(COLLECTIVE.slot_bytes) for part in whole.pieces(own_part.length)]

    def write(index: int, slot: Slot) -> None:
        own_pieces[index].copy_to(slot.address)

    def read(index: int, slots: Mapping[int, Slot]) -> None:
        for rank, slot in slots.items():
            destinations[rank][index].copy_from(slot.address)

    header = Header.of(OperationKind.ALL_GATHER, whole, link.collectives.number)
    await _exchange_pieces(link, header, len(own_pieces), write, read)


async def broadcast(link: Link, memory: TensorMemory, source: int) -> None:
    """The source writes, the others read."""
    header = Header.of(OperationKind.BROADCAST, memory, link.collectives.number, source=source)
    for piece in memory.pieces(COLLECTIVE.slot_bytes):
        if source == link.rank:
            piece.copy_to((await link.writer.slot()).address)
            link.writer.publish(header)
        else:
            await _read(link.readers[source], piece, header)


async def send(link: Link, memory: TensorMemory, target: int) -> None:
    """Complete when everything is written: while the lane has room, the target need not receive yet."""
    header = Header.of(OperationKind.SEND, memory, link.sends[target].number)
    writer = link.lane_writers[target]
    for piece in memory.pieces(LANE.slot_bytes):
        piece.copy_to((await writer.slot()).address)
        writer.publish(header)


async def recv(link: Link, memory: TensorMemory, source: int) -> None:
    header = Header.of(OperationKind.SEND, memory, link.receives[source].number)
    for piece in memory.pieces(LANE.slot_bytes):
        await _read(link.lane_readers[source], piece, header)


async def _read(reader: RingReader, piece: TensorMemory, header: Header) -> None:
    await all_written([reader], header)
    piece.copy_from(reader.slot().address)
    reader.release()


async def _exchange_pieces(
    link: Link, header: Header, count: int, write: Write, read: Read, num_ahead: int = _NUM_AHEAD
) -> None:
    """Every rank writes `count` pieces, up to `num_ahead` before it reads, and reads all ranks' pieces."""
    num_written = 0
    for index in range(count):
        while num_written < min(count, index + num_ahead):
            write(num_written, await link.writer.slot())
            link.writer.publish(header)
            num_written += 1
        await all_written(link.readers.values(), header)
        read(index, {rank: reader.slot() for rank, reader in link.readers.items()})
        for reader in link.readers.values():
            reader.release()


def _elements_per_peer(link: Link, tensor: Tensor) -> int:
    """Elements in a slot for each rank but the writer."""
    return COLLECTIVE.slot_bytes // tensor.element_size() // (link.size - 1)


def _write_parts(link: Link, parts: Sequence[Tensor], slot: Slot, room: int) -> None:
    for rank, part in enumerate(parts):
        if rank != link.rank:
            view_like(slot.memory, part, room * (rank - (rank > link.rank))).copy_(part)


def _parts_for_this_rank(
    link: Link, slots: Mapping[int, Slot], own_part: Tensor, room: int
) -> dict[int, Tensor]:
    return {
        rank: view_like(slot.memory, own_part, room * (link.rank - (link.rank > rank)))
        for rank, slot in slots.items()
    }


def _reduce(
    link: Link, others: Mapping[int, Tensor], own_part: Tensor, output: Tensor, op: Reduction
) -> None:
    reduce_in_rank_order(lambda rank, _: others.get(rank, own_part), link.size, output, op, link.scratch)
