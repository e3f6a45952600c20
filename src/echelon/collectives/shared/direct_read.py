"""Operations on large tensors that each rank reads in the memory of the others: one copy, no slots.

Every rank publishes the address of its tensor, reads what it needs of the others', and returns when all
have read its own. The system must let ranks read each other's memory.
"""

from torch import Tensor

from echelon.collectives.group import Reduction
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.slots import (
    Header,
    OperationKind,
    RingReader,
    TensorMemory,
    Wait,
    all_written,
    reduce_in_rank_order,
)

_CHUNK_BYTES = 1 << 19  # small enough to stay in the cache between the read and the addition


async def all_reduce(link: Link, flat: Tensor, op: Reduction) -> None:
    """Each rank reduces one part for all; then each reads the others' parts.

    A rank that publishes its reduced part has read all it needs of the others' parts, so those may be
    overwritten.
    """
    parts = flat.tensor_split(link.size)
    starts = [part.data_ptr() - flat.data_ptr() for part in parts]
    memory = TensorMemory.of(flat)
    header = Header.of(OperationKind.ALL_REDUCE, memory, link.collectives.number, op=op, readable=memory)
    addresses = await _exchange_addresses(link, header)
    _release_all(link, now=False)
    _reduce(link, addresses, starts[link.rank], parts[link.rank], parts[link.rank], op)
    await _exchange_addresses(link, header)
    for rank, address in addresses.items():
        link.read(rank, address + starts[rank], parts[rank].data_ptr(), parts[rank].nbytes)
    _release_all(link, now=True)
    await link.writer.all_read()  # the caller may overwrite or free the tensor when this returns


async def reduce_scatter(link: Link, output: Tensor, whole: Tensor, op: Reduction) -> None:
    own_part = whole.view(link.size, -1)[link.rank]
    memory = TensorMemory.of(whole)
    header = Header.of(OperationKind.REDUCE_SCATTER, memory, link.collectives.number, op=op, readable=memory)
    addresses = await _exchange_addresses(link, header)
    _reduce(link, addresses, own_part.data_ptr() - whole.data_ptr(), own_part, output, op)
    _release_all(link, now=True)
    await link.writer.all_read()


async def all_gather(link: Link, whole: TensorMemory, own_part: TensorMemory) -> None:
    header = Header.of(OperationKind.ALL_GATHER, whole, link.collectives.number, readable=own_part)
    addresses = await _exchange_addresses(link, header)
    for rank, address in addresses.items():
        link.read(rank, address, whole.address + rank * own_part.length, own_part.length)
    _release_all(link, now=True)
    await link.writer.all_read()


async def broadcast(link: Link, memory: TensorMemory, source: int) -> None:
    header = Header.of(
        OperationKind.BROADCAST, memory, link.collectives.number, source=source, readable=memory
    )
    if source == link.rank:
        await link.writer.slot()
        link.writer.publish(header)
        await link.writer.all_read()
    else:
        await _read(link, link.readers[source], source, memory, header)


async def send(link: Link, memory: TensorMemory, target: int) -> None:
    """Complete when the target has read it."""
    writer = link.lane_writers[target]
    await writer.slot()
    writer.publish(Header.of(OperationKind.SEND, memory, link.sends[target].number, readable=memory))
    await writer.all_read(Wait.FOR_READERS)


async def recv(link: Link, memory: TensorMemory, source: int) -> None:
    header = Header.of(OperationKind.SEND, memory, link.receives[source].number, readable=memory)
    await _read(link, link.lane_readers[source], source, memory, header)


async def _read(link: Link, reader: RingReader, source: int, memory: TensorMemory, header: Header) -> None:
    await all_written([reader], header)
    link.read(source, reader.address(), memory.address, memory.length)
    reader.release(now=True)


async def _exchange_addresses(link: Link, header: Header) -> dict[int, int]:
    """Publish the address of this rank's tensor; return the others' addresses, by rank."""
    await link.writer.slot()
    link.writer.publish(header)
    await all_written(link.readers.values(), header)
    return {rank: reader.address() for rank, reader in link.readers.items()}


def _release_all(link: Link, *, now: bool) -> None:
    for reader in link.readers.values():
        reader.release(now=now)


def _reduce(
    link: Link, addresses: dict[int, int], start: int, own_part: Tensor, output: Tensor, op: Reduction
) -> None:
    """Reduce the parts of all ranks, `start` bytes into each rank's tensor, into `output`."""
    elements = _CHUNK_BYTES // own_part.element_size()
    chunks = zip(own_part.split(elements), output.split(elements), strict=True)
    for index, (own_chunk, result) in enumerate(chunks):
        offset = start + index * _CHUNK_BYTES

        def fetch(rank: int, buffer: Tensor, own_chunk: Tensor = own_chunk, offset: int = offset) -> Tensor:
            if rank == link.rank:
                return own_chunk
            link.read(rank, addresses[rank] + offset, buffer.data_ptr(), buffer.nbytes)
            return buffer

        reduce_in_rank_order(fetch, link.size, result, op, link.scratch)
