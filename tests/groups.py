"""Groups for tests of single strategies, in one process."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import final

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from echelon.collectives import Group, Ledger
from echelon.collectives.group import Reduction, Work
from echelon.launching import PeerLost


class PartialGroup(Group):
    """A group that can do only what its subclass says."""

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        raise NotImplementedError

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:
        raise NotImplementedError

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        raise NotImplementedError

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Work:
        raise NotImplementedError

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        raise NotImplementedError

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Work:
        raise NotImplementedError

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Work:
        raise NotImplementedError

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Work:
        raise NotImplementedError

    def _send(self, tensor: Tensor, target: int) -> Work:
        raise NotImplementedError

    def _recv(self, tensor: Tensor, source: int) -> Work:
        raise NotImplementedError

    def _barrier(self) -> Work:
        raise NotImplementedError


@final
class _Deferred(Work):
    def __init__(self, pending: list[Work], finish: Callable[[], object], *sources: Tensor) -> None:
        self._pending, self._finish, self._sources = pending, finish, sources
        pending.append(self)

    def wait(self) -> None:
        self._pending.remove(self)
        self._finish()


@final
class DeferredGroup(PartialGroup):
    """Pretends to be rank r of N, all of which hold the same tensors.

    An operation takes effect when its handle is waited for, and not before: code that forgets to wait, or
    waits too late, sees wrong values every time. What is received is ones. `reduced` has the memory of what
    `reduce_scatter` was given.
    """

    def __init__(self, axis: str = "data", rank: int = 0, size: int = 2) -> None:
        assert size > 1, "a group of one rank waits at once"
        super().__init__(axis, rank, size, Ledger())
        self.pending: list[Work] = []
        self.reduced: list[StorageWeakRef] = []

    @property
    def subjects(self) -> list[str]:
        """What each operation of this step was about, in order."""
        return [move.subject for move in self.ledger.moves]

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        factor = self.size if op == "sum" else 1
        return self._defer(lambda: tensor.mul_(factor), tensor)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:
        assert op == "sum"
        self.reduced.append(StorageWeakRef(tensor.untyped_storage()))
        part = tensor.view(self.size, -1)[self.rank]
        return self._defer(lambda: output.view(-1).copy_(part * self.size), output, tensor)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        sent = tensor.clone().view(1, -1)  # what it holds now: a later update comes too late
        return self._defer(lambda: output.view(self.size, -1).copy_(sent), output, tensor)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:  # noqa: ARG002
        return self._defer(lambda: None, tensor)

    def _send(self, tensor: Tensor, target: int) -> Work:  # noqa: ARG002
        return self._defer(lambda: None, tensor)

    def _recv(self, tensor: Tensor, source: int) -> Work:  # noqa: ARG002
        return self._defer(lambda: tensor.fill_(1.0), tensor)

    def _defer(self, finish: Callable[[], object], *tensors: Tensor) -> Work:
        return _Deferred(self.pending, finish, *tensors)


class Queues:
    """What is on the way between the threads of one process, by (source, target)."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], SimpleQueue[Tensor | None]] = {}

    def _between(self, source: int, target: int) -> SimpleQueue[Tensor | None]:
        # Not a defaultdict: two threads that ask at once may each make a queue, and one of them waits at a
        # queue that the dict has lost. `setdefault` gives both the same one.
        return self._queues.setdefault((source, target), SimpleQueue())

    def put(self, source: int, target: int, tensor: Tensor | None) -> None:
        self._between(source, target).put(tensor)

    def take(self, source: int, target: int) -> Tensor:
        tensor = self._between(source, target).get(timeout=30.0)
        if tensor is None:
            raise PeerLost(f"rank {source} is lost")
        return tensor

    def lose(self, source: int, target: int) -> None:
        """Whoever receives next from `source` learns that it is gone."""
        self.put(source, target, None)


@final
class QueueGroup(PartialGroup):
    """One of the threads of this process, which send to each other by queues."""

    def __init__(self, queues: Queues, rank: int, size: int, ledger: Ledger) -> None:
        super().__init__("data", rank, size, ledger)
        self._queues = queues

    def _send(self, tensor: Tensor, target: int) -> Work:
        self._queues.put(self.rank, target, tensor.clone())
        return _Deferred([], lambda: None)

    def _recv(self, tensor: Tensor, source: int) -> Work:
        return _Deferred([], lambda: tensor.copy_(self._queues.take(source, self.rank)))
