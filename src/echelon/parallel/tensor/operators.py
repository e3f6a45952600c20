"""What a split layer does that torch.compile cannot look into, as operators that it records: collectives.

Ranks that compile the same layer record the same operators in the same order. All engines of a process share
compiled code, so a group comes as data: its number, a tensor in host memory.
"""

import itertools
from typing import final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.parallel.tensor.moves import check_divisible, gathered, summed, summed_part

# Compiled code outlives an engine and must not keep its groups alive.
_groups: WeakValueDictionary[int, Group] = WeakValueDictionary()
_numbers: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
_next_number = itertools.count()


def number_of(group: Group) -> Tensor:
    """By which the operators know the group."""
    if group not in _numbers:
        _numbers[group] = number = next(_next_number)
        _groups[number] = group
    return torch.tensor(_numbers[group])


@final
class RecordedMoves:
    """The moves of `GroupMoves`, as operators: none changes its input."""

    in_place = False

    def __init__(self, number: Tensor, ranks: int, rank: int) -> None:
        self._number, self.ranks, self.rank = number, ranks, rank

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        result: Tensor = gather_parts(x, self._number, self.ranks, dim)
        return result

    def summed(self, x: Tensor) -> Tensor:
        result: Tensor = sum_over_ranks(x, self._number)
        return result

    def summed_part(self, x: Tensor, dim: int) -> Tensor:
        check_divisible(x, self.ranks, dim)
        result: Tensor = sum_part_over_ranks(x, self._number, self.ranks, dim)
        return result


@torch.library.custom_op("echelon::gather_parts", mutates_args=())
def gather_parts(x: Tensor, group: Tensor, ranks: int, dim: int) -> Tensor:  # noqa: ARG001
    """The parts of all ranks, one after the other along `dim`."""
    return gathered(x, _group(group), dim).contiguous()


@torch.library.custom_op("echelon::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group: Tensor) -> Tensor:
    """The sum over ranks, in new memory."""
    return summed(x.clone(memory_format=torch.contiguous_format), _group(group))


@torch.library.custom_op("echelon::sum_part_over_ranks", mutates_args=())
def sum_part_over_ranks(x: Tensor, group: Tensor, ranks: int, dim: int) -> Tensor:  # noqa: ARG001
    """This rank's part, along `dim`, of the sum over ranks."""
    return summed_part(x, _group(group), dim).contiguous()


@torch.library.custom_op("echelon::checked_tokens", mutates_args=())
def checked_tokens(tokens: Tensor, vocabulary: int) -> Tensor:
    """A copy of tokens in host memory, which are all in the vocabulary. To check them is to read them, which
    torch.compile cannot record."""
    check_tokens(tokens, vocabulary)
    return tokens.clone()


def check_tokens(tokens: Tensor, vocabulary: int) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if not 0 <= low <= high < vocabulary:
        raise IndexError(f"tokens {low} … {high} of a vocabulary of {vocabulary}")


def _group(number: Tensor) -> Group:
    group = _groups.get(int(number))
    if group is None:
        raise RuntimeError(
            "a compiled layer communicates, and the group of its engine is gone; make a new engine"
        )
    return group


@gather_parts.register_fake
def _(x: Tensor, group: Tensor, ranks: int, dim: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])


@sum_over_ranks.register_fake
def _(x: Tensor, group: Tensor) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


@sum_part_over_ranks.register_fake
def _(x: Tensor, group: Tensor, ranks: int, dim: int) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :])


@checked_tokens.register_fake
def _(tokens: Tensor, vocabulary: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(tokens)
