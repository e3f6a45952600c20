"""The operations that the ranks of a pipeline issue over NCCL, as lists, and whether they all end.

    send      is queued on the device, each direction between two ranks in its order. It ends when its receive
              is queued too: NCCL may buffer a message, but none that is large
    receive   is queued when its head is there, from host to host: then its sender has queued the message
    post      queues a receive that stands in the next step
    compute   where the host may have to wait for its device: for all that it has queued
    meet      a collective of all ranks

Nothing is computed, so that a plan takes milliseconds. `test_message_order.py` compares the lists with what
the real interpreter issues.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from echelon.engine.step.runtime.script import Script
from echelon.program import RECEIVES, SENDS, Op
from tests.engine.step.runtime.number_training import Run
from tests.nccl_like import Deadlock


class Operation(NamedTuple):
    """`peer`: of a message."""

    kind: str
    peer: int
    label: str

    def __str__(self) -> str:
        return f"{self.kind} {self.label}"


def operations_of(runs: Sequence[Run], rank: int) -> Iterator[Operation]:
    """What a rank issues in steps, evaluations and drains, one after the other."""
    for run in runs:
        script = Script(run.program, rank, empties=run.empties)
        for instruction, label in zip(script.instructions, script.labels, strict=True):
            peer = -1 if instruction.peer is None else instruction.peer
            if instruction.op in SENDS:
                yield Operation("send", peer, label)
            elif instruction.op in RECEIVES:
                yield Operation("receive", peer, label)
            else:
                yield Operation("compute", peer, label)
                if instruction.op is Op.NORM and not run.program.versioned:
                    yield Operation("meet", peer, label)
        for peer, receives in script.in_flight.items():
            yield from (Operation("post", peer, "at the end of a step") for _ in receives)
        if not run.trains or not run.empties:
            yield Operation("meet", -1, "at the end of a step")


@final
class Simulation:
    """Takes the ranks to the ends of their lists.

    `waits`: hosts wait for their devices wherever they compute. `buffered`: but not for what they have sent.
    `ahead`: a receive is queued when the one before it from the same rank was taken, whether or not its head
    is there, as it once was.
    """

    def __init__(
        self,
        lists: Sequence[Sequence[Operation]],
        *,
        waits: bool = False,
        buffered: bool = False,
        ahead: bool = False,
    ) -> None:
        self._lists, self._waits, self._buffered, self._ahead = lists, waits, buffered, ahead
        self._places = [0] * len(lists)
        self._num_met = [0] * len(lists)
        self._come: dict[int, dict[int, str]] = {}  # to each collective: the ranks, and what they call it
        # Of each direction (sender, receiver): how many messages are queued at either end, and taken.
        self._sent: Counter[tuple[int, int]] = Counter()
        self._queued: Counter[tuple[int, int]] = Counter()
        self._taken: Counter[tuple[int, int]] = Counter()
        receives = [(o.peer, rank) for rank, each in enumerate(lists) for o in each if o.kind == "receive"]
        self._num_messages = Counter(receives)

    def run(self) -> None:
        """Raises Deadlock if not all ranks come to their ends."""
        moved = True
        while moved:
            moved = False
            for rank, operations in enumerate(self._lists):
                while self._places[rank] < len(operations) and self._does(
                    operations[self._places[rank]], rank
                ):
                    self._places[rank] += 1
                    moved = True
        places = zip(self._lists, self._places, strict=True)
        waiting = [
            f"rank {rank} waits in {operations[place]}"
            for rank, (operations, place) in enumerate(places)
            if place < len(operations)
        ]
        if waiting:
            raise Deadlock("\n".join(waiting))

    def _does(self, operation: Operation, rank: int) -> bool:
        """Do an operation, if it can be done now."""
        pair = (operation.peer, rank)
        match operation.kind:
            case "send":
                self._sent[rank, operation.peer] += 1
                return True
            case "post":
                return self._queue(pair)
            case "receive":
                return self._receive(pair)
            case "compute":
                return not self._waits or self._is_idle(rank)
        return self._meet(operation, rank)

    def _meet(self, operation: Operation, rank: int) -> bool:
        """Go on when all ranks have come, and to the same collective."""
        number = self._num_met[rank]
        come = self._come.setdefault(number, {})
        come[rank] = operation.label.split()[0]
        if len(come) < len(self._lists):
            return False
        if len(set(come.values())) > 1:
            raise Deadlock(f"ranks meet in different collectives: {come}")
        self._num_met[rank] += 1
        return True

    def _queue(self, pair: tuple[int, int]) -> bool:
        """Have the next receive of a direction queued."""
        if self._queued[pair] == self._taken[pair]:
            if not self._ahead and self._sent[pair] == self._taken[pair]:
                return False
            self._queued[pair] += 1
        return True

    def _receive(self, pair: tuple[int, int]) -> bool:
        if not self._queue(pair) or self._sent[pair] == self._taken[pair]:
            return False
        self._taken[pair] += 1
        if self._ahead and self._taken[pair] < self._num_messages[pair]:
            self._queue(pair)
        return True

    def _is_idle(self, rank: int) -> bool:
        """Whether all that a rank has queued has ended."""
        return all(
            self._queued[pair] <= self._sent[pair]
            if pair[1] == rank
            else self._buffered or self._sent[pair] <= self._queued[pair]
            for pair in self._num_messages
            if rank in pair
        )
