"""Memory that ranks share: that of tensors, and rings of slots, each written by one rank and read by others.

A rank's region holds the ring of its collectives, which all peers read, and a lane to each other rank, for
`send`. The positions of writers and readers are not stored here: peers notify each other over sockets, and
the system calls of the sockets also order the accesses to this memory.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Generator, Sequence
from enum import Enum, IntEnum, auto
from functools import cached_property
from mmap import mmap
from struct import Struct
from types import coroutine
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from echelon.collectives.comparison import MismatchError
from echelon.collectives.group import COMBINE, Reduction

if TYPE_CHECKING:
    from echelon.collectives.shared.peers import PeerSocket

# The memory of tensors, without autograd, and the reduction of all ranks' parts in it.

Fetch = Callable[[int, Tensor], Tensor]  # returns the part of a rank; it may use the given memory for it

copy_bytes = ctypes.memmove  # (destination, source, bytes); releases the interpreter's lock


class TensorMemory(NamedTuple):
    """The memory that a tensor has when this is made. This object, and each piece of it, keeps it alive."""

    address: int
    length: int  # in bytes
    dtype: torch.dtype
    storage: UntypedStorage

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMemory":
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                "a conjugate or negative view does not have its values in its memory; call .resolve_conj() "
                "or .resolve_neg() first"
            )
        return cls(tensor.data_ptr(), tensor.nbytes, tensor.dtype, tensor.untyped_storage())

    def pieces(self, length: int) -> "list[TensorMemory]":
        """Parts of `length` bytes; the last may be shorter."""
        if self.length <= length:
            return [self]
        return [
            self._replace(address=self.address + start, length=min(length, self.length - start))
            for start in range(0, self.length, length)
        ]

    def copy_to(self, address: int) -> None:
        copy_bytes(address, self.address, self.length)

    def copy_from(self, address: int) -> None:
        copy_bytes(self.address, address, self.length)


def flat_alias(tensor: Tensor) -> Tensor:
    """Return a flat tensor over the same memory, without the autograd and inference state of `tensor`.

    Like a backend we write into memory, not into a node of the graph: the version counter stays. The memory
    lives as long as the alias or a view of it, also after `tensor.data = …`.
    """
    memory = TensorMemory.of(tensor)
    buffer = (ctypes.c_char * memory.length).from_address(memory.address)
    buffer.storage = memory.storage  # type: ignore[attr-defined]  # keeps the memory alive
    with torch.inference_mode(False):
        return torch.frombuffer(buffer, dtype=memory.dtype)


def pieces(flat: Tensor, elements: int) -> Sequence[Tensor]:
    """Parts of `elements` elements; the last may be shorter."""
    return [flat] if flat.numel() <= elements else flat.split(elements)


def view_like(buffer: Tensor, like: Tensor, start: int = 0) -> Tensor:
    """`buffer` (bytes) in the type of `like`: as many elements as `like` has, from element `start` on."""
    return buffer.view(like.dtype)[start : start + like.numel()]


def reduce_in_rank_order(
    fetch: Fetch, size: int, output: Tensor, op: Reduction, scratch: tuple[Tensor, Tensor]
) -> None:
    """Reduce the parts of ranks 0 … size−1, in this order, into `output`. Only the last addition writes to
    `output`, which may be the memory of a part that is not yet added."""
    partial, incoming = (view_like(buffer, output) for buffer in scratch)
    total = fetch(0, partial)
    for rank in range(1, size):
        destination = output if rank == size - 1 else partial
        total = COMBINE[op](total, fetch(rank, incoming), out=destination)
    if op == "mean":
        output.div_(size)


_PR_SET_PTRACER = 0x59616D61  # from linux/prctl.h


class _IoVector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the interpreter's lock


def let_siblings_read() -> None:
    """Allow the other children of our parent, which are the ranks, to read this process. Yama (on Ubuntu, for
    example) forbids that by default."""
    if sys.platform == "linux" and os.getppid() > 1:  # under process 1 every process would be a sibling
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read_memory(process: int, address: int, destination: int, length: int) -> None:
    """Copy `length` bytes at `address` of `process` to `destination`, an address of this process."""
    num_copied = 0
    while num_copied < length:
        local = _IoVector(destination + num_copied, length - num_copied)
        remote = _IoVector(address + num_copied, length - num_copied)
        result = _libc.process_vm_readv(process, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if result <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        num_copied += result


# Rings of slots.

HEADER_BYTES = 64  # one cache line, so that slots stay aligned for every type


class OperationKind(IntEnum):
    """The operations that go through shared memory."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    SEND = 5


_REDUCTIONS: list[Reduction | None] = [None, "sum", "mean", "min", "max"]
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Header(NamedTuple):
    """All integers, so that it can be packed into the slot."""

    number: int  # of the operation in its queue, so that no rank reads the slot of another operation
    kind: int
    payload: int
    dtype: int
    reduction: int
    source: int  # of a broadcast, else −1
    is_direct: int  # 1: readers copy from `address`, not from the slot
    address: int  # of the writer's tensor

    @classmethod
    def of(
        cls,
        kind: OperationKind,
        payload: TensorMemory,
        number: int,
        *,
        op: Reduction | None = None,
        source: int = -1,
        readable: TensorMemory | None = None,
    ) -> "Header":
        """Return the header of operation `number` of its queue; others read `readable` directly, if given."""
        dtype, reduction = _DTYPE_CODES[payload.dtype], _REDUCTIONS.index(op)
        address = 0 if readable is None else readable.address
        return cls(number, kind, payload.length, dtype, reduction, source, readable is not None, address)

    def matches(self, other: "Header") -> bool:
        """Return whether both describe the same operation; each rank's tensor has an address of its own."""
        return self[:-1] == other[:-1]

    def __str__(self) -> str:
        name = OperationKind(self.kind).name.lower()
        dtype = str(_DTYPES[self.dtype]).removeprefix("torch.")
        reduction = f", {_REDUCTIONS[self.reduction]}" if self.reduction else ""
        source = f", from rank {self.source}" if self.source >= 0 else ""
        in_place = ", read in place" if self.is_direct else ""
        details = reduction + source + in_place
        return f"{name} of {self.payload} bytes of {dtype}{details} (number {self.number})"


PACKED_HEADER = Struct(f"{len(Header._fields)}q")
assert PACKED_HEADER.size <= HEADER_BYTES


class RingShape(NamedTuple):
    """The number of slots of a ring, and the bytes that fit in one."""

    slots: int
    slot_bytes: int

    @property
    def slots_per_release(self) -> int:
        """Slots that a reader gives back together, because every notice wakes the writer up."""
        return self.slots // 2

    @property
    def free_bytes(self) -> int:
        """Return what can be written at least, once everything written before has been read."""
        return (self.slots - self.slots_per_release + 1) * self.slot_bytes

    @property
    def ring_bytes(self) -> int:
        return self.slots * (HEADER_BYTES + self.slot_bytes)


# Large slots need few wake-ups, small ones stay in the cache: measured, 1 MiB is near the best of both.
COLLECTIVE = RingShape(slots=4, slot_bytes=1 << 20)
LANE = RingShape(slots=4, slot_bytes=1 << 18)


class Notice(IntEnum):
    """The messages between peers: one more slot has been written, or read."""

    WROTE = 0
    READ = 1
    LANE_WROTE = 2
    LANE_READ = 3


class Wait(Enum):
    """Why an operation waits: it has more to do, or it only needs to learn that the peers have read."""

    FOR_NEXT_STEP = auto()
    FOR_READERS = auto()


def region_bytes(size: int) -> int:
    return COLLECTIVE.ring_bytes + size * LANE.ring_bytes


class Slot(NamedTuple):
    memory: Tensor  # as bytes
    address: int


class Ring:
    """The slots of one ring in a mapped region. Piece n is in slot n modulo the number of slots."""

    def __init__(self, region: mmap, start: int, shape: RingShape) -> None:
        stride = HEADER_BYTES + shape.slot_bytes
        self.shape = shape
        self._region = region
        self._starts = [start + index * stride for index in range(shape.slots)]

    def slot(self, piece: int) -> Slot:
        return self._slots[piece % self.shape.slots]

    @cached_property  # most rings of a large group are never used
    def _slots(self) -> list[Slot]:
        size = self.shape.slot_bytes
        with torch.inference_mode(False):  # whichever thread comes first
            memories = [
                torch.frombuffer(self._region, dtype=torch.uint8, count=size, offset=start + HEADER_BYTES)
                for start in self._starts
            ]
        return [Slot(memory, memory.data_ptr()) for memory in memories]

    def header(self, piece: int) -> Header:
        return Header._make(PACKED_HEADER.unpack_from(self._region, self._starts[piece % self.shape.slots]))

    def set_header(self, piece: int, header: Header) -> None:
        PACKED_HEADER.pack_into(self._region, self._starts[piece % self.shape.slots], *header)


def collective_ring(region: mmap) -> Ring:
    return Ring(region, 0, COLLECTIVE)


def lane(region: mmap, target: int) -> Ring:
    return Ring(region, COLLECTIVE.ring_bytes + target * LANE.ring_bytes, LANE)


class RingWriter:
    def __init__(self, ring: Ring, readers: Sequence["PeerSocket"], *, wrote: Notice, read: Notice) -> None:
        self._ring, self._readers, self._wrote, self._read = ring, readers, wrote, read
        self._num_pieces = 0

    async def slot(self) -> Slot:
        """Return the next slot to write, once every reader has read its earlier content."""
        await self._until_read(self._num_pieces + 1 - self._ring.shape.slots)
        return self._ring.slot(self._num_pieces)

    async def all_read(self, wait: Wait = Wait.FOR_NEXT_STEP) -> None:
        """Return when everything written has been read. The readers must release the last slot `now`."""
        await self._until_read(self._num_pieces, wait)

    def publish(self, header: Header) -> None:
        """Give the slot to the readers."""
        # The header is written before the notice is sent, and a socket orders memory accesses: a reader that
        # has the notice sees the header and the bytes of its slot.
        self._ring.set_header(self._num_pieces, header)
        self._num_pieces += 1
        for reader in self._readers:
            reader.notify(self._wrote, 1)

    async def _until_read(self, pieces: int, wait: Wait = Wait.FOR_NEXT_STEP) -> None:
        while late := [reader for reader in self._readers if reader.num_received(self._read) < pieces]:
            for reader in late:
                reader.raise_if_lost()
            await _pause(wait)


class RingReader:
    def __init__(self, ring: Ring, writer: "PeerSocket", *, wrote: Notice, read: Notice) -> None:
        self._ring, self._writer, self._wrote, self._read = ring, writer, wrote, read
        self._num_pieces = 0
        self._num_unreported = 0  # slots released here, of which the writer does not know yet

    def slot(self) -> Slot:
        """Return the next slot, which must be written."""
        return self._ring.slot(self._num_pieces)

    def address(self) -> int:
        """Return the address of the writer's tensor in the next slot, which must be written."""
        return self._ring.header(self._num_pieces).address

    def release(self, *, now: bool = False) -> None:
        """Give the slot back to the writer; `now` notifies it at once, else together with others."""
        self._num_pieces += 1
        self._num_unreported += 1
        if now or self._num_unreported == self._ring.shape.slots_per_release:
            self._writer.notify(self._read, self._num_unreported)
            self._num_unreported = 0

    def is_written(self, expected: Header) -> bool:
        """Return whether the next slot is written; raise if it does not match, or if the writer is lost."""
        if self._writer.num_received(self._wrote) <= self._num_pieces:
            self._writer.raise_if_lost()
            return False
        header = self._ring.header(self._num_pieces)
        if not header.matches(expected):
            raise MismatchError(
                f"rank {self._writer.rank} passed {header} where {expected} was expected: all ranks must "
                "call the same operations in the same order, with equal sizes, types, reductions and sources"
            )
        return True


async def all_written(readers: Collection[RingReader], expected: Header) -> None:
    """Return when the next slot of every ring is written and matches `expected`.

    Every pass checks all rings, so that a late rank does not hide that another one is lost. What a rank
    wrote before it was lost still counts.
    """
    while True:
        written = [reader.is_written(expected) for reader in readers]
        if all(written):
            return
        await _pause(Wait.FOR_NEXT_STEP)


@coroutine
def _pause(wait: Wait) -> Generator[Wait]:
    yield wait
