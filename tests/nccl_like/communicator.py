"""A communicator: a queue of operations for each of its ranks, and when their heads complete."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from echelon.collectives import Work

MemberTensors = list[tuple[Tensor, ...]]  # of one operation: the tensors of each rank that takes part


class Mismatch(Exception):  # noqa: N818
    """Two ranks met with different operations: NCCL would hang, or corrupt memory."""


@final
class Operation(Work):
    """One rank's part of an operation.

    `peer` is None in a collective. `form` must be equal on all ranks. `move` gets the tensors of all ranks,
    in their order; in a send or receive those of this rank first. `wait` is how the rank waits for it.
    """

    def __init__(
        self,
        communicator: "Communicator",
        rank: int,
        name: str,
        form: tuple[object, ...],
        peer: int | None,
        tensors: tuple[Tensor, ...],
        move: Callable[[MemberTensors], None],
        wait: Callable[["Operation"], None],
    ) -> None:
        self.communicator, self.rank, self.name, self.form = communicator, rank, name, form
        self.peer, self.tensors, self.move, self._wait = peer, tensors, move, wait
        self.is_complete = False

    @property
    def label(self) -> str:
        """'send to 3 (16 uint8)'; ranks are those of the world."""
        form = " ".join(str(each).removeprefix("torch.") for each in self.form)
        if self.peer is None:
            return f"{self.name} ({form})"
        other = self.communicator.members[self.peer]
        return f"{self.name} {'to' if self.name == 'send' else 'from'} {other} ({form})"

    def __str__(self) -> str:
        return f"{self.label} on {self.communicator}"

    def meets(self, other: "Operation") -> bool:
        """Whether two heads are parts of one operation. Raises Mismatch if they are, in different forms."""
        if self.peer is None:
            is_partner, is_equal = other.peer is None, (self.name, self.form) == (other.name, other.form)
        else:
            is_partner = other.peer == self.rank and {self.name, other.name} == {"send", "recv"}
            is_equal = self.form == other.form
        if is_partner and not is_equal:
            first, second = (self.communicator.members[each.rank] for each in (self, other))
            raise Mismatch(f"rank {first} has {self}, and rank {second} has {other.label}")
        return is_partner

    def wait(self) -> None:
        self._wait(self)

    def done(self) -> bool:
        return self.is_complete


@final
class Communicator:
    """The queues of its members. Ranks in it are those of the group.

    A member's queue is a stream of its device, which other communicators may use too (`take_stream`).
    """

    def __init__(self, axis: str, members: tuple[int, ...], number: int) -> None:
        self.axis, self.members, self._number = axis, members, number
        self.joined: set[int] = set()  # members that have come to make it
        self._ranks = range(len(members))
        self._queues: list[deque[Operation]] = [deque() for _ in members]

    def __str__(self) -> str:
        return f"{self.axis}[{self._number}] of ranks {'-'.join(map(str, self.members))}"

    def take_stream(self, member: int, stream: deque[Operation]) -> None:
        """Let a member's operations run on `stream`, before the first of them."""
        self._queues[self.members.index(member)] = stream

    def queue_of(self, member: int) -> list[Operation]:
        """What waits of this communicator."""
        queue = self._queues[self.members.index(member)]
        return [operation for operation in queue if operation.communicator is self]

    def issue(self, operation: Operation) -> None:
        """Append to the rank's queue, and complete whatever can."""
        queue = self._queues[operation.rank]
        queue.append(operation)
        changed = [queue] if len(queue) == 1 else []
        while changed:
            queue = changed.pop()
            if queue:
                changed += queue[0].communicator.complete(queue[0])

    def complete(self, head: Operation) -> Sequence[deque[Operation]]:
        """Complete the head of a queue if its partners are heads too; returns the queues that moved on."""
        ranks = self._ranks if head.peer is None else (head.rank, head.peer)
        queues = [self._queues[rank] for rank in ranks]
        if not all(queues):
            return ()
        heads = [queue[0] for queue in queues]
        for other in heads:
            if other.communicator is not self or (other is not head and not head.meets(other)):
                return ()
        head.move([operation.tensors for operation in heads])
        for queue in queues:
            queue.popleft().is_complete = True
        return queues


@final
class Making:
    """The making of a communicator, which is complete when all members have come."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    @property
    def is_complete(self) -> bool:
        return len(self._communicator.joined) == len(self._communicator.members)

    def __str__(self) -> str:
        missing = [rank for rank in self._communicator.members if rank not in self._communicator.joined]
        return f"the making of {self._communicator}, to which {missing} have not come"
