"""The positions that a gate of experts sees, where ranks share sequences (`context`, `sequence`)."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.nn.experts import Positions
from echelon.nn.sequence import View
from echelon.parallel.context import put_together


@final
class SharedPositions(Positions):
    """This rank's part of the sequences, of which every rank has an equal number of positions."""

    def __init__(
        self, numbers: Callable[[int], Tensor], context: Group, stream: Group | None, view: View
    ) -> None:
        """`numbers`: from the number of positions here to their places in the whole sequence. `stream`: the
        ranks that divide the part of a context rank. `view` knows what is padding."""
        self._numbers, self._context, self._stream, self._view = numbers, context, stream, view

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedPositions":
        """A copy of a gate sees the same part: it is called inside of the same passes."""
        return self

    def numbers(self, length: int) -> Tensor:
        return self._numbers(length)

    def is_true(self, length: int) -> Tensor | None:
        true_length = self._view.true_length
        return None if true_length is None else self._numbers(length) < true_length

    def whole_length(self, length: int) -> int:
        true_length = self._view.true_length
        parts = self._context.size * (1 if self._stream is None else self._stream.size)
        return length * parts if true_length is None else true_length

    def gather(self, x: Tensor) -> Tensor:
        if self._stream is not None:
            x = torch.cat(_all(x, self._stream), 1)
        return put_together(_all(x, self._context))


def _all(x: Tensor, group: Group) -> list[Tensor]:
    """The tensors of all ranks of the group."""
    if group.size == 1:
        return [x]
    x = x.detach().contiguous()
    parts = torch.empty(group.size, *x.shape, dtype=x.dtype, device=x.device)
    with group.ledger.about("routing"):
        group.all_gather(parts, x)
    return list(parts)
