"""A Group that moves nothing between processes: exact for one rank, and a recorder for many."""

from typing import final

from torch import Tensor

from echelon.collectives.group import Group, Reduction
from echelon.collectives.ledger import Ledger
from echelon.collectives.work import Work


@final
class CompletedWork(Work):
    """An operation that was complete when it began."""

    def wait(self) -> None:
        pass


_COMPLETED = CompletedWork()


class RecordingGroup(Group):
    """Pretends to be rank r of N: counts every byte in the ledger, moves none, needs no process group.

    It copies this rank's own part to its place and leaves what the rank would receive unchanged. With one
    rank that is exact, because there is nothing to receive.

        group = RecordingGroup("data", rank=17, size=4096)
        group.all_reduce(gradients)
        group.ledger.total("data").sent
    """

    def __init__(self, axis: str, rank: int = 0, size: int = 1, ledger: Ledger | None = None) -> None:
        super().__init__(axis, rank, size, ledger or Ledger())

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:  # noqa: ARG002
        return _COMPLETED

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:  # noqa: ARG002
        return self._copy(output, self._own_part(tensor))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        return self._copy(self._own_part(output), tensor)

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Work:
        source, destination = tensor.split(input_rows)[self.rank], output.split(output_rows)[self.rank]
        return self._copy(destination, source) if source.shape == destination.shape else _COMPLETED

    def _broadcast(self, tensor: Tensor, source: int) -> Work:  # noqa: ARG002
        return _COMPLETED

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Work:  # noqa: ARG002
        return _COMPLETED

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Work:  # noqa: ARG002
        return _COMPLETED if tensor is None else self._copy(output, self._own_part(tensor))

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Work:  # noqa: ARG002
        return _COMPLETED if output is None else self._copy(self._own_part(output), tensor)

    def _send(self, tensor: Tensor, target: int) -> Work:  # noqa: ARG002
        return _COMPLETED

    def _recv(self, tensor: Tensor, source: int) -> Work:  # noqa: ARG002
        return _COMPLETED

    def _barrier(self) -> Work:
        return _COMPLETED

    def _own_part(self, whole: Tensor) -> Tensor:
        return whole.view(self.size, -1)[self.rank]

    def _copy(self, output: Tensor, tensor: Tensor) -> Work:
        output.view(-1).copy_(tensor.reshape(-1))
        return _COMPLETED
