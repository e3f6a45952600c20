"""Ranks of one process whose operations are advanced by hand, so that a test decides who goes first.

Rings, headers and coroutines are the real ones. Notices are plain counters, and a rank reads the memory of
another one by a plain copy.
"""

from collections import deque
from collections.abc import Callable
from mmap import mmap
from typing import cast

import torch

from echelon.collectives.shared.link import Link
from echelon.collectives.shared.operation_queue import OperationQueue, Steps
from echelon.collectives.shared.slots import (
    COLLECTIVE,
    Notice,
    RingReader,
    RingWriter,
    collective_ring,
    copy_bytes,
    lane,
    region_bytes,
)


class SimulatedPeer:
    """What rank `owner` sees of rank `rank`."""

    def __init__(self, owner: int, rank: int, counts: dict[tuple[int, int, Notice], int]) -> None:
        self._owner, self.rank, self._counts = owner, rank, counts

    def notify(self, notice: Notice, times: int) -> None:
        key = (self._owner, self.rank, notice)
        self._counts[key] = self._counts.get(key, 0) + times

    def num_received(self, notice: Notice) -> int:
        return self._counts.get((self.rank, self._owner, notice), 0)

    def raise_if_lost(self) -> None:
        pass


class SimulatedLink:
    """One rank. `operations` are begun one after the other, each by the call that makes its coroutine."""

    def __init__(
        self, rank: int, regions: list[mmap], counts: dict[tuple[int, int, Notice], int], can_read: bool
    ) -> None:
        self.rank, self.size, self.can_read = rank, len(regions), can_read
        others = [other for other in range(self.size) if other != rank]
        peers = {other: SimulatedPeer(rank, other, counts) for other in others}
        collective = {"wrote": Notice.WROTE, "read": Notice.READ}
        pairwise = {"wrote": Notice.LANE_WROTE, "read": Notice.LANE_READ}
        self.writer = RingWriter(collective_ring(regions[rank]), list(peers.values()), **collective)
        self.readers = {r: RingReader(collective_ring(regions[r]), peers[r], **collective) for r in others}
        self.lane_writers = {r: RingWriter(lane(regions[rank], r), [peers[r]], **pairwise) for r in others}
        self.lane_readers = {r: RingReader(lane(regions[r], rank), peers[r], **pairwise) for r in others}
        first, second = torch.empty(2, COLLECTIVE.slot_bytes, dtype=torch.uint8)
        self.scratch = (first, second)
        self.collectives = OperationQueue()
        self.sends = {other: OperationQueue() for other in others}
        self.receives = {other: OperationQueue() for other in others}
        self.before_read: Callable[[], None] = lambda: None
        self.operations: deque[tuple[Callable[[Link], Steps], Callable[[], None]]] = deque()
        self._steps: Steps | None = None
        self.is_running = False

    def read(self, peer: int, address: int, destination: int, length: int) -> None:  # noqa: ARG002
        self.before_read()
        copy_bytes(destination, address, length)

    def is_slot_in_use(self, address: int) -> bool:
        """Whether the address is in a slot that this rank reads next, and has not released."""
        readers = [*self.readers.values(), *self.lane_readers.values()]
        slots = [reader.slot() for reader in readers]
        return any(slot.address <= address < slot.address + len(slot.memory) for slot in slots)

    def add(self, begin: Callable[[Link], Steps], then: Callable[[], None] = lambda: None) -> None:
        """An operation, and what its caller does right after its return."""
        self.operations.append((begin, then))

    def advance(self) -> None:
        """Go on as far as possible."""
        while self.operations:
            begin, then = self.operations[0]
            self._steps = self._steps or begin(cast(Link, self))
            self.is_running = True
            try:
                self._steps.send(None)
                return
            except StopIteration:
                self._steps = None
                self.operations.popleft()
                for queue in (self.collectives, *self.sends.values(), *self.receives.values()):
                    queue.number += 1
                then()
            finally:
                self.is_running = False


def simulate(size: int, *, can_read: bool) -> list[SimulatedLink]:
    regions = [mmap(-1, region_bytes(size)) for _ in range(size)]
    counts: dict[tuple[int, int, Notice], int] = {}
    return [SimulatedLink(rank, regions, counts, can_read) for rank in range(size)]


def run(links: list[SimulatedLink]) -> None:
    """Advance all ranks in turn until every operation is over."""
    for _ in range(1000):
        for link in links:
            link.advance()
        if not any(link.operations for link in links):
            return
    raise AssertionError("the ranks wait for each other forever")


def advance_others(links: list[SimulatedLink], slow: int) -> None:
    """All ranks but one go on as far as they can."""
    for _ in range(10):
        for link in links:
            if link.rank != slow:
                link.advance()
