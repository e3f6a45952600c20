"""A group for tests of single strategies: nothing happens before it is waited for."""

from collections.abc import Callable
from typing import final

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from echelon.collectives import Group, Ledger
from echelon.collectives.group import Reduction, Work


@final
class _Deferred(Work):
    def __init__(self, group: "DeferredGroup", finish: Callable[[], object], *sources: Tensor) -> None:
        self._group, self._finish, self._sources = group, finish, sources
        group.pending.append(self)

    def wait(self) -> None:
        self._group.pending.remove(self)
        self._finish()


@final
class DeferredGroup(Group):
    """Pretends to be rank r of N, all of which hold the same tensors, in this one process.

    An operation takes effect when its handle is waited for, and not before: code that forgets to wait, or
    waits too late, sees wrong values every time. `reduced` has the memory of what `reduce_scatter` was given.
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
        return _Deferred(self, lambda: tensor.mul_(factor), tensor)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:
        assert op == "sum"
        self.reduced.append(StorageWeakRef(tensor.untyped_storage()))
        part = tensor.view(self.size, -1)[self.rank]
        return _Deferred(self, lambda: output.view(-1).copy_(part * self.size), output, tensor)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return _Deferred(
            self, lambda: output.view(self.size, -1).copy_(tensor.clone().view(1, -1)), output, tensor
        )

    def _broadcast(self, tensor: Tensor, source: int) -> Work:  # noqa: ARG002
        return _Deferred(self, lambda: None, tensor)

    def _send(self, tensor: Tensor, target: int) -> Work:  # noqa: ARG002
        return _Deferred(self, lambda: None, tensor)

    def _recv(self, tensor: Tensor, source: int) -> Work:  # noqa: ARG002
        return _Deferred(self, lambda: tensor.fill_(1.0), tensor)

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Work:
        raise NotImplementedError

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Work:
        raise NotImplementedError

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Work:
        raise NotImplementedError

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Work:
        raise NotImplementedError

    def _barrier(self) -> Work:
        return _Deferred(self, lambda: None)
