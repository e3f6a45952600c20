"""Rings: a writer waits for its readers, readers report in batches, and a wrong header is an error."""

import ctypes
import os
from mmap import PAGESIZE, mmap

import pytest
import torch

from echelon.collectives.comparison import MismatchError
from echelon.collectives.shared.slots import (
    COLLECTIVE,
    LANE,
    PACKED_HEADER,
    Header,
    Notice,
    OperationKind,
    RingReader,
    RingWriter,
    TensorMemory,
    Wait,
    all_written,
    collective_ring,
    flat_alias,
    lane,
    let_siblings_read,
    pieces,
    read_memory,
    reduce_in_rank_order,
    region_bytes,
    view_like,
)
from echelon.launching import PeerLost
from tests.collectives.shared.simulated_links import SimulatedPeer

FLOATS = TensorMemory.of(torch.zeros(4))
HEADER = Header.of(OperationKind.ALL_REDUCE, FLOATS, 7, op="sum")


def test_a_header_survives_packing() -> None:
    header = Header.of(OperationKind.BROADCAST, FLOATS, 3, source=2, readable=FLOATS)
    assert Header._make(PACKED_HEADER.unpack(PACKED_HEADER.pack(*header))) == header
    assert (header.payload, header.address) == (16, FLOATS.address)


def test_tensors_of_two_ranks_have_different_addresses() -> None:
    memories = [TensorMemory.of(torch.zeros(4)) for _ in range(2)]
    first, second = (Header.of(OperationKind.SEND, memory, 0, readable=memory) for memory in memories)
    assert first.address != second.address
    assert first.matches(second)


@pytest.mark.parametrize(
    "other",
    [
        Header.of(OperationKind.ALL_REDUCE, FLOATS, 8, op="sum"),
        Header.of(OperationKind.REDUCE_SCATTER, FLOATS, 7, op="sum"),
        Header.of(OperationKind.ALL_REDUCE, TensorMemory.of(torch.zeros(5)), 7, op="sum"),
        Header.of(OperationKind.ALL_REDUCE, TensorMemory.of(torch.zeros(4, dtype=torch.int32)), 7, op="sum"),
        Header.of(OperationKind.ALL_REDUCE, FLOATS, 7, op="max"),
        Header.of(OperationKind.ALL_REDUCE, FLOATS, 7, op="sum", source=0),
        Header.of(OperationKind.ALL_REDUCE, FLOATS, 7, op="sum", readable=FLOATS),
    ],
    ids=["number", "kind", "payload", "type", "reduction", "source", "direct"],
)
def test_every_other_difference_is_a_mismatch(other: Header) -> None:
    assert not HEADER.matches(other)


def test_a_header_prints_what_matters() -> None:
    assert str(HEADER) == "all_reduce of 16 bytes of float32, sum (number 7)"
    broadcast = Header.of(OperationKind.BROADCAST, FLOATS, 0, source=1, readable=FLOATS)
    assert str(broadcast) == "broadcast of 16 bytes of float32, from rank 1, read in place (number 0)"


MEMORY = TensorMemory.of(torch.zeros(4))
WROTE_READ = {"wrote": Notice.WROTE, "read": Notice.READ}


def header(number: int = 0) -> Header:
    return Header.of(OperationKind.ALL_REDUCE, MEMORY, number, op="sum")


class Pair:
    """The two ends of one ring: rank 0 writes, rank 1 reads."""

    def __init__(self) -> None:
        region = mmap(-1, region_bytes(2))
        counts: dict[tuple[int, int, Notice], int] = {}
        self.reader_as_peer, self.writer_as_peer = SimulatedPeer(0, 1, counts), SimulatedPeer(1, 0, counts)
        self.writer = RingWriter(collective_ring(region), [self.reader_as_peer], **WROTE_READ)
        self.reader = RingReader(collective_ring(region), self.writer_as_peer, **WROTE_READ)

    def write(self, value: int) -> bool:
        """Whether there was a free slot."""
        steps = self.writer.slot()
        try:
            steps.send(None)
        except StopIteration as stop:
            stop.value.memory.fill_(value)
            self.writer.publish(header())
            return True
        steps.close()
        return False

    def read(self, *, now: bool = False) -> int:
        assert self.reader.is_written(header())
        value = int(self.reader.slot().memory[0])
        self.reader.release(now=now)
        return value


def test_values_come_in_order_over_many_rounds() -> None:
    pair = Pair()
    for value in range(3 * COLLECTIVE.slots):
        assert pair.write(value)
        assert pair.read() == value


def test_a_writer_stops_at_a_slot_that_is_not_read() -> None:
    pair = Pair()
    assert [pair.write(value) for value in range(COLLECTIVE.slots + 1)] == [True] * COLLECTIVE.slots + [False]
    for value in range(COLLECTIVE.slots_per_release):
        assert not pair.write(9), "readers report in batches"
        assert pair.read() == value
    assert pair.write(9)


def test_a_release_now_is_reported_at_once() -> None:
    pair = Pair()
    pair.write(1)
    finished = pair.writer.all_read(Wait.FOR_READERS)
    assert finished.send(None) is Wait.FOR_READERS
    pair.read(now=True)
    with pytest.raises(StopIteration):
        finished.send(None)


def test_a_slot_of_another_operation_is_an_error() -> None:
    pair = Pair()
    pair.write(1)
    with pytest.raises(
        MismatchError, match=r"rank 0 passed .* \(number 0\) where .* \(number 1\) was expected"
    ):
        pair.reader.is_written(header(1))


def test_a_lost_writer_is_noticed_only_after_what_it_wrote() -> None:
    pair = Pair()
    pair.write(5)

    def lost() -> None:
        raise PeerLost("rank 0 is gone")

    pair.writer_as_peer.raise_if_lost = lost  # type: ignore[method-assign]
    assert pair.read() == 5
    with pytest.raises(PeerLost):
        pair.reader.is_written(header())


def test_a_late_rank_does_not_hide_a_lost_one() -> None:
    late, gone = Pair(), Pair()

    def lost() -> None:
        raise PeerLost("rank 0 is gone")

    gone.writer_as_peer.raise_if_lost = lost  # type: ignore[method-assign]
    with pytest.raises(PeerLost):
        all_written([late.reader, gone.reader], header()).send(None)


def test_rings_of_a_region_do_not_overlap() -> None:
    size = 3
    region = mmap(-1, region_bytes(size))
    rings = [collective_ring(region), *(lane(region, target) for target in range(size))]
    for number, ring in enumerate(rings):
        for turn in range(ring.shape.slots):
            ring.set_header(turn, header(number))
            ring.slot(turn).memory.fill_(number)
    for number, ring in enumerate(rings):
        for turn in range(ring.shape.slots):
            assert ring.header(turn) == header(number)
            assert ring.slot(turn).memory.unique().tolist() == [number]
            assert ring.slot(turn).address % 64 == 0, "aligned for every type"


def test_a_lane_holds_what_it_promises() -> None:
    assert LANE.free_bytes == (LANE.slots - LANE.slots_per_release + 1) * LANE.slot_bytes
    assert region_bytes(4) - region_bytes(3) == LANE.ring_bytes


def test_pieces_cover_the_memory() -> None:
    memory = TensorMemory.of(torch.arange(10, dtype=torch.uint8))
    assert memory.pieces(10) == [memory]
    assert [(piece.address - memory.address, piece.length) for piece in memory.pieces(4)] == [
        (0, 4),
        (4, 4),
        (8, 2),
    ]
    assert [len(piece) for piece in pieces(torch.zeros(10), 4)] == [4, 4, 2]


def test_copies_go_both_ways() -> None:
    source, destination = torch.arange(4.0), torch.zeros(4)
    TensorMemory.of(source).copy_to(destination.data_ptr())
    assert destination.tolist() == [0.0, 1.0, 2.0, 3.0]
    source.fill_(7)
    TensorMemory.of(destination).copy_from(source.data_ptr())
    assert destination.tolist() == [7.0] * 4


def test_an_alias_writes_without_a_version_and_outlives_the_tensor() -> None:
    tensor = torch.zeros(2, 3, requires_grad=True)
    version = tensor._version
    alias = flat_alias(tensor)
    alias.fill_(4)
    assert (alias.shape, alias.requires_grad, tensor._version) == ((6,), False, version)
    assert tensor[1, 2].item() == 4
    tensor.data = torch.empty(0)  # gives up the memory
    others = [torch.full((6,), -1.0) for _ in range(8)]  # would get it
    assert alias.tolist() == [4.0] * 6
    assert all(other.tolist() == [-1.0] * 6 for other in others)


def test_an_alias_of_an_inference_tensor_can_be_written_outside() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3)
        alias = flat_alias(tensor)
    alias.add_(1)
    assert tensor.tolist() == [1.0] * 3


@pytest.mark.parametrize("view", [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2)._neg_view()])
def test_views_whose_values_are_not_in_memory_are_refused(view: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"call .resolve_conj\(\) or .resolve_neg\(\) first"):
        TensorMemory.of(view)


def test_a_buffer_is_viewed_in_another_type() -> None:
    buffer, like = torch.zeros(64, dtype=torch.uint8), torch.zeros(3)
    view = view_like(buffer, like, start=2)
    view.fill_(1.5)
    assert buffer.view(torch.float32).tolist()[:6] == [0.0, 0.0, 1.5, 1.5, 1.5, 0.0]


@pytest.mark.parametrize("own_rank", range(3))
@pytest.mark.parametrize(("op", "value"), [("sum", 14.0), ("mean", 14.0 / 3), ("min", 2.0), ("max", 7.0)])
def test_the_output_may_be_a_part_that_is_not_yet_added(op: str, value: float, own_rank: int) -> None:
    parts = [torch.full((4,), number) for number in (5.0, 2.0, 7.0)]
    first, second = torch.zeros(2, 64, dtype=torch.uint8)
    order: list[int] = []

    def fetch(rank: int, buffer: torch.Tensor) -> torch.Tensor:
        order.append(rank)
        return parts[rank] if rank == own_rank else buffer.copy_(parts[rank])

    reduce_in_rank_order(fetch, 3, parts[own_rank], op, (first, second))  # type: ignore[arg-type]
    assert parts[own_rank].tolist() == pytest.approx([value] * 4)
    assert order == [0, 1, 2]


def test_bytes_of_this_process_can_be_read() -> None:
    source = ctypes.create_string_buffer(bytes(range(100)), 100)
    destination = ctypes.create_string_buffer(100)
    let_siblings_read()
    read_memory(os.getpid(), ctypes.addressof(source) + 10, ctypes.addressof(destination), 50)
    assert destination.raw == bytes(range(10, 60)) + bytes(50)


def test_memory_that_is_not_readable_is_an_error() -> None:
    """Also where only its second half is not: a part that was read does not count."""
    memory = mmap(-1, 2 * PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + PAGESIZE), PAGESIZE, 0) == 0
    destination = ctypes.create_string_buffer(2 * PAGESIZE)
    read_memory(os.getpid(), address, ctypes.addressof(destination), PAGESIZE)
    with pytest.raises(OSError, match="Bad address"):
        read_memory(os.getpid(), address, ctypes.addressof(destination), 2 * PAGESIZE)


def test_a_process_that_ended_is_an_error() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    buffer = ctypes.create_string_buffer(8)
    with pytest.raises(ProcessLookupError):
        read_memory(child, ctypes.addressof(buffer), ctypes.addressof(buffer), 8)
