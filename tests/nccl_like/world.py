"""Ranks as threads, and their communicators."""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple, final

from torch import Tensor

from echelon.collectives import Ledger, Work
from tests.groups import PartialGroup
from tests.nccl_like.communicator import Communicator, Operation
from tests.nccl_like.group import CPU, NcclLikeGroup
from tests.nccl_like.rank_threads import RankThreads

_HOST = " host"  # ends the axis of queues in host memory


@final
class NcclWorld(RankThreads):
    """Ranks as threads, and their communicators.

        world = NcclWorld(4)
        world.run(lambda rank: train(world.group("pipeline", range(4), rank)))

    `lazy`: communicators are made at their first use. `waits_for_sends=False`: a wait for a send returns at
    once, as if every message were copied before it is sent. `seed`: choose who runs next at random.
    `streams`: a rank has so many, and its communicators take them in turn; else each has one of its own.
    """

    def __init__(
        self,
        size: int,
        *,
        lazy: bool = False,
        waits_for_sends: bool = True,
        seed: int | None = None,
        streams: int | None = None,
    ) -> None:
        super().__init__(size, seed)
        pools = ([deque[Operation]() for _ in range(streams or 0)] for _ in range(size))
        self._streams = [cycle(pool) for pool in pools]
        self._lazy, self._waits_for_sends = lazy, waits_for_sends
        self._communicators: dict[tuple[str, tuple[int, ...], int], Communicator] = {}
        self._made: Counter[tuple[int, str, tuple[int, ...]]] = Counter()

    def group(
        self, axis: str, members: Sequence[int], rank: int, ledger: Ledger | None = None
    ) -> NcclLikeGroup:
        """A new communicator of `members`. The n-th calls of all of them with this axis make the same one."""
        group = self._group(axis, tuple(members), rank, ledger or Ledger())
        stream = next(self._streams[rank], None)
        if stream is not None:
            group.communicator.take_stream(rank, stream)
        if not self._lazy:
            group.connect(CPU)
        return group

    def host_group(
        self, axis: str, members: Sequence[int], rank: int, ledger: Ledger | None = None
    ) -> "HostGroup":
        """The same ranks over Gloo: see HostGroup."""
        ledger = ledger or Ledger()
        here = members.index(rank)
        pairs = [pair for other in range(len(members)) for pair in ((other, here), (here, other))]
        queues = {
            pair: self._group(f"{axis}{_HOST}", (members[pair[0]], members[pair[1]]), rank, ledger)
            for pair in pairs
            if pair != (here, here)
        }
        for queue in queues.values():
            queue.join()
        return HostGroup(axis, here, len(members), ledger, queues)

    def synchronize(self, rank: int) -> None:
        """Return when all that the rank has issued on its device is done, as torch.cuda.synchronize does."""
        on_device = [each for each in self._communicators.values() if not each.axis.endswith(_HOST)]
        self.wait(rank, _Rest([each for each in on_device if rank in each.members], rank))

    def describe(self, rank: int) -> list[str]:
        return [
            f"queue on {communicator}: {', '.join(operation.label for operation in queue)}"
            for communicator in self._communicators.values()
            if rank in communicator.members and (queue := communicator.queue_of(rank))
        ]

    def _group(self, axis: str, members: tuple[int, ...], rank: int, ledger: Ledger) -> NcclLikeGroup:
        number = self._made[rank, axis, members]
        self._made[rank, axis, members] += 1
        key = (axis, members, number)
        communicator = self._communicators.setdefault(key, Communicator(*key))
        return NcclLikeGroup(self, communicator, rank, ledger, waits_for_sends=self._waits_for_sends)


class _Rest(NamedTuple):
    """The end of all operations of a rank."""

    communicators: Sequence[Communicator]
    rank: int

    @property
    def is_complete(self) -> bool:
        return not any(communicator.queue_of(self.rank) for communicator in self.communicators)

    def __str__(self) -> str:
        return "the end of all its operations"


@final
class HostGroup(PartialGroup):
    """Sends and receives in host memory, each direction between two ranks in a queue of its own, as Gloo.

    Also here a send completes only with its receive.
    """

    def __init__(
        self,
        axis: str,
        rank: int,
        size: int,
        ledger: Ledger,
        queues: dict[tuple[int, int], NcclLikeGroup],
    ) -> None:
        """`queues`: by (source, target), of which one is this rank."""
        super().__init__(axis, rank, size, ledger)
        self._queues = queues

    def _send(self, tensor: Tensor, target: int) -> Work:
        return self._queues[self.rank, target]._send(tensor, 1)

    def _recv(self, tensor: Tensor, source: int) -> Work:
        return self._queues[source, self.rank]._recv(tensor, 0)
