"""Memory that ranks share: rings of slots, each written by one rank and read by one or several others.

A rank's region holds the ring of its collectives, which all peers read, and a lane to each other rank, for
`send`. How far anyone has written or read is not in here: peers tell each other over sockets, whose system
calls also order the accesses to this memory.
"""

from collections.abc import Collection, Generator, Sequence
from enum import Enum, IntEnum, auto
from mmap import mmap
from struct import Struct
from types import coroutine
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from echelon.collectives.group import Reduction
from echelon.collectives.shared.memory import Span


class Shape(NamedTuple):
    """How many slots a ring has, and what a slot holds."""

    slots: int
    slot_bytes: int

    @property
    def at_once(self) -> int:
        """Slots that a reader gives back together: every word about them wakes the writer up."""
        return self.slots // 2

    @property
    def free_bytes(self) -> int:
        """What can be written at least, once all that was written before has been read."""
        return (self.slots - self.at_once + 1) * self.slot_bytes

    @property
    def ring_bytes(self) -> int:
        return self.slots * (_LABEL_BYTES + self.slot_bytes)


_LABEL_BYTES = 64  # a cache line, so that slots stay aligned for any type

# Large slots need few wake-ups, small ones stay in the cache: measured, 1 MiB is near the best of both.
COLLECTIVE = Shape(slots=4, slot_bytes=1 << 20)
LANE = Shape(slots=4, slot_bytes=1 << 18)


class Word(IntEnum):
    """All that peers say to each other: that one more slot has been written, or read."""

    WROTE = 0
    READ = 1
    LANE_WROTE = 2
    LANE_READ = 3


class Operation(IntEnum):
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    SEND = 5


_REDUCTIONS: list[Reduction | None] = [None, "sum", "mean", "min", "max"]
_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Label(NamedTuple):
    """What is written on a slot, so that ranks that do different things find out."""

    number: int  # of the operation in its line: nobody takes an earlier one's for it
    operation: int
    payload: int
    dtype: int
    reduction: int
    source: int  # of a broadcast, else −1
    direct: int  # whether it is to be read at `address`, and not in the slot
    address: int  # of the writer's tensor

    @classmethod
    def of(
        cls,
        operation: Operation,
        whole: Span,
        number: int,
        *,
        op: Reduction | None = None,
        source: int = -1,
        at: Span | None = None,
    ) -> "Label":
        """For operation `number` of its line on `whole`, read by the others in `at` if given."""
        return cls(
            number,
            operation,
            whole.length,
            _CODES[whole.dtype],
            _REDUCTIONS.index(op),
            source,
            at is not None,
            0 if at is None else at.address,
        )

    def means(self, other: "Label") -> bool:
        return self[:-1] == other[:-1]

    def __str__(self) -> str:
        name = Operation(self.operation).name.lower()
        dtype = str(_DTYPES[self.dtype]).removeprefix("torch.")
        reduction = f", {_REDUCTIONS[self.reduction]}" if self.reduction else ""
        source = f", from rank {self.source}" if self.source >= 0 else ""
        way = ", read in place" if self.direct else ""
        return f"{name} of {self.payload} bytes of {dtype}{reduction}{source}{way} (number {self.number})"


_LABEL = Struct(f"{len(Label._fields)}q")
assert _LABEL.size <= _LABEL_BYTES


class Peer(Protocol):
    """Another rank, as far as its words go."""

    rank: int

    def tell(self, word: Word, times: int) -> None: ...
    def has_told(self, word: Word) -> int: ...
    def check(self) -> None: ...


class Pause(Enum):
    """For what an operation waits: to go on, or only to learn that it is over."""

    IN_BETWEEN = auto()
    AT_LEISURE = auto()


class Mismatch(RuntimeError):  # noqa: N818 (said as it happened)
    """Two ranks of a group did different things where they must do the same."""


def region_bytes(size: int) -> int:
    """What each of `size` ranks shares."""
    return COLLECTIVE.ring_bytes + size * LANE.ring_bytes


class Slot(NamedTuple):
    """A place in a ring."""

    memory: Tensor  # as bytes
    address: int


class Ring:
    """The slots of one ring, in a mapped region."""

    def __init__(self, region: mmap, start: int, shape: Shape) -> None:
        step = _LABEL_BYTES + shape.slot_bytes
        starts = [start + index * step for index in range(shape.slots)]
        self.shape = shape
        self._region, self._starts = region, starts
        memories = [
            torch.frombuffer(region, dtype=torch.uint8, count=shape.slot_bytes, offset=at + _LABEL_BYTES)
            for at in starts
        ]
        self._slots = [Slot(memory, memory.data_ptr()) for memory in memories]

    def slot(self, turn: int) -> Slot:
        return self._slots[turn % self.shape.slots]

    def label(self, turn: int) -> Label:
        return Label._make(_LABEL.unpack_from(self._region, self._starts[turn % self.shape.slots]))

    def set_label(self, turn: int, label: Label) -> None:
        _LABEL.pack_into(self._region, self._starts[turn % self.shape.slots], *label)


def collective_ring(region: mmap) -> Ring:
    return Ring(region, 0, COLLECTIVE)


def lane(region: mmap, target: int) -> Ring:
    return Ring(region, COLLECTIVE.ring_bytes + target * LANE.ring_bytes, LANE)


class Outbox:
    """The writing end of a ring."""

    def __init__(self, ring: Ring, readers: Sequence[Peer], *, wrote: Word, read: Word) -> None:
        self._ring, self._readers, self._wrote, self._read = ring, readers, wrote, read
        self._turn = 0

    async def slot(self) -> Slot:
        """The next slot to write, once every reader has read what it held."""
        await self._until_read(self._turn + 1 - self._ring.shape.slots)
        return self._ring.slot(self._turn)

    async def all_read(self, pause: Pause = Pause.IN_BETWEEN) -> None:
        """Return when everything written has been read, of which the readers tell only if asked to."""
        await self._until_read(self._turn, pause)

    def publish(self, label: Label) -> None:
        """Let the readers have the slot."""
        self._ring.set_label(self._turn, label)
        self._turn += 1
        for reader in self._readers:
            reader.tell(self._wrote, 1)

    async def _until_read(self, turns: int, pause: Pause = Pause.IN_BETWEEN) -> None:
        while late := [reader for reader in self._readers if reader.has_told(self._read) < turns]:
            for reader in late:
                reader.check()
            await _pause(pause)


class Inbox:
    """A reading end of a ring."""

    def __init__(self, ring: Ring, writer: Peer, *, wrote: Word, read: Word) -> None:
        self._ring, self._writer, self._wrote, self._read = ring, writer, wrote, read
        self._turn = 0
        self._owed = 0  # slots read, of which the writer does not know yet

    def slot(self) -> Slot:
        """What is in the next slot, which must be written."""
        return self._ring.slot(self._turn)

    def address(self) -> int:
        """Where the writer has what the next slot stands for, which must be written."""
        return self._ring.label(self._turn).address

    def release(self, *, urgent: bool = False) -> None:
        """Let the writer have the slot again; only when it is urgent, wake it up for that."""
        self._turn += 1
        self._owed += 1
        if urgent or self._owed == self._ring.shape.at_once:
            self._writer.tell(self._read, self._owed)
            self._owed = 0

    def holds(self, label: Label) -> bool:
        """Whether the next slot is written; raise if it is not what `label` says, or never will be."""
        if self._writer.has_told(self._wrote) <= self._turn:
            self._writer.check()
            return False
        found = self._ring.label(self._turn)
        if not found.means(label):
            raise Mismatch(
                f"rank {self._writer.rank} passed {found} where {label} was expected: all ranks must call "
                "the same operations in the same order, with equal sizes, types, reductions and sources"
            )
        return True


async def all_written(inboxes: Collection[Inbox], label: Label) -> None:
    """Return when the next slot of every one of `inboxes` is written, as `label` says.

    All are looked at before each pause, so that nobody waits for a late rank while another is gone. What a
    rank said before it was lost still counts.
    """
    while True:
        there = [inbox.holds(label) for inbox in inboxes]
        if all(there):
            return
        await _pause()


@coroutine
def _pause(pause: Pause = Pause.IN_BETWEEN) -> Generator[Pause]:
    yield pause
