"""Groups that move nothing between processes: a group of one, and a recorder that pretends to be many."""

from typing import final

from torch import Tensor

from echelon.collectives.group import Group, Pending, Reduction
from echelon.collectives.ledger import Ledger


@final
class Done(Pending):
    """Nothing to wait for."""

    def wait(self) -> None:
        pass


_DONE = Done()


@final
class RecordingGroup(Group):
    """Pretends to be rank r of N: counts every byte in the ledger, moves none, needs no process group.

    What a rank would receive is left as it is; its own part is put in its place. As a group of one it is
    exact, since there is nothing to receive.

        group = RecordingGroup("data", rank=17, size=4096)
        group.all_reduce(gradients)
        group.ledger.total("data").sent
    """

    def __init__(self, axis: str, rank: int = 0, size: int = 1, ledger: Ledger | None = None) -> None:
        super().__init__(axis, rank, size, ledger or Ledger())

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Pending:  # noqa: ARG002
        return _DONE

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Pending:  # noqa: ARG002
        return self._copy(output, self._mine(tensor))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Pending:
        return self._copy(self._mine(output), tensor)

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Pending:
        mine, theirs = tensor.split(input_rows)[self.rank], output.split(output_rows)[self.rank]
        return self._copy(theirs, mine) if mine.shape == theirs.shape else _DONE

    def _broadcast(self, tensor: Tensor, source: int) -> Pending:  # noqa: ARG002
        return _DONE

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Pending:  # noqa: ARG002
        return _DONE

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Pending:  # noqa: ARG002
        return _DONE if tensor is None else self._copy(output, self._mine(tensor))

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Pending:  # noqa: ARG002
        return _DONE if output is None else self._copy(self._mine(output), tensor)

    def _send(self, tensor: Tensor, target: int) -> Pending:  # noqa: ARG002
        return _DONE

    def _recv(self, tensor: Tensor, source: int) -> Pending:  # noqa: ARG002
        return _DONE

    def _barrier(self) -> Pending:
        return _DONE

    def _mine(self, whole: Tensor) -> Tensor:
        return whole.view(self.size, -1)[self.rank]

    def _copy(self, output: Tensor, tensor: Tensor) -> Pending:
        output.view(-1).copy_(tensor.reshape(-1))
        return _DONE
