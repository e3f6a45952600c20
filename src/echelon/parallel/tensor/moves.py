"""The collectives of ranks that share a layer: gather parts, and sum."""

from typing import final

import torch
from torch import Tensor

from echelon.collectives import Group, Handle
from echelon.errors import UserError
from echelon.nn.tracing import untraced

_SUBJECT = "tensor parallelism"


@final
class GroupMoves:
    """The moves of one group, done at once."""

    in_place = True

    def __init__(self, group: Group) -> None:
        self._group, self.ranks, self.rank = group, group.size, group.rank

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        return gathered(x, self._group, dim)

    def summed(self, x: Tensor) -> Tensor:
        return summed(x, self._group)

    def summed_part(self, x: Tensor, dim: int) -> Tensor:
        return summed_part(x, self._group, dim)


@untraced
def gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    """The parts of all ranks, one after the other along `dim`."""
    parts = x.new_empty(group.size, *x.shape)
    with group.ledger.about(_SUBJECT):
        group.all_gather(parts, x.contiguous())
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def summed_part(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's part, along `dim`, of the sum over ranks."""
    part, handle = start_sum_of_part(x, group, dim, wait=True)
    handle.wait()
    return part


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, in the memory of `x` if that is contiguous."""
    total, handle = start_sum(x, group, wait=True)
    handle.wait()
    return total


def start_sum(x: Tensor, group: Group, *, wait: bool = False) -> tuple[Tensor, Handle]:
    """Start to sum over ranks: the tensor that will hold the sum, and what to wait for."""
    x = x.contiguous()
    with group.ledger.about(_SUBJECT):
        return x, group.all_reduce(x, wait=wait)


def start_sum_of_part(x: Tensor, group: Group, dim: int = 1, *, wait: bool = False) -> tuple[Tensor, Handle]:
    """Start to sum over ranks: the tensor that will hold this rank's part, and what to wait for."""
    check_divisible(x, group.size, dim)
    parts = x.unflatten(dim, (group.size, -1)).movedim(dim, 0).contiguous()
    part = torch.empty_like(parts[0])
    with group.ledger.about(_SUBJECT):
        return part, group.reduce_scatter(part, parts, wait=wait)


def check_divisible(x: Tensor, ranks: int, dim: int) -> None:
    if x.shape[dim] % ranks:
        raise UserError(
            f"sequence=true tensor={ranks}: a sequence of {x.shape[dim]} is not divisible by "
            f"{ranks}; use sequences of a multiple of {ranks}, or sequence=false"
        )
