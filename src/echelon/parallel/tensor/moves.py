"""The collectives of ranks that share a layer, at once or as operators of torch.compile: gather and sum."""

import itertools
from functools import partial
from typing import final
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from echelon.collectives import Group, Handle
from echelon.collectives.agreement import gather_rows
from echelon.errors import UserError
from echelon.nn.losses import VocabularyPart
from echelon.nn.tracing import untraced

_SUBJECT = "tensor parallelism"


@final
class GroupMoves:
    """The moves of one group, done at once: it gathers parts and sums over its ranks."""

    in_place = True  # a sum may overwrite its input

    def __init__(self, group: Group) -> None:
        self._group, self.ranks, self.rank = group, group.size, group.rank

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        return gathered(x, self._group, dim)

    def summed(self, x: Tensor) -> Tensor:
        """The sum over ranks, in the memory of `x` if that is contiguous."""
        return start_sum(x, self._group, wait=True)[0]

    def summed_part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, along `dim`, of the sum over ranks."""
        return start_sum_of_part(x, self._group, dim, wait=True)[0]


@untraced
def gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    """The parts of all ranks, one after the other along `dim`."""
    return gather_rows(x, group, _SUBJECT).movedim(0, dim).flatten(dim, dim + 1)


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


def vocabulary_part(columns: int, group: Group, vocabulary: int) -> VocabularyPart:
    """Describe this rank's `columns` of logits, of so many in all without padding."""
    gather = partial(gather_rows, group=group, subject="loss")
    return VocabularyPart(columns * group.rank, min(vocabulary, columns * group.size), gather)


def check_divisible(x: Tensor, ranks: int, dim: int) -> None:
    if x.shape[dim] % ranks:
        raise UserError(
            f"sequence=true tensor={ranks}: a sequence of {x.shape[dim]} is not divisible by "
            f"{ranks}; use sequences of a multiple of {ranks}, or sequence=false"
        )


# The same as operators that torch.compile records, since it cannot trace into collectives.
#
# Ranks that compile the same layer record the same operators in the same order. All engines of a process
# share compiled code, so a group comes as data: its number, a tensor in host memory.


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


Moves = GroupMoves | RecordedMoves


@torch.library.custom_op("echelon::gather_parts", mutates_args=())
def gather_parts(x: Tensor, group: Tensor, ranks: int, dim: int) -> Tensor:  # noqa: ARG001
    return gathered(x, _group(group), dim).contiguous()


@torch.library.custom_op("echelon::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group: Tensor) -> Tensor:
    """The sum over ranks, in new memory."""
    return GroupMoves(_group(group)).summed(x.clone(memory_format=torch.contiguous_format))


@torch.library.custom_op("echelon::sum_part_over_ranks", mutates_args=())
def sum_part_over_ranks(x: Tensor, group: Tensor, ranks: int, dim: int) -> Tensor:  # noqa: ARG001
    return GroupMoves(_group(group)).summed_part(x, dim).contiguous()


@torch.library.custom_op("echelon::checked_tokens", mutates_args=())
def checked_tokens(tokens: Tensor, vocabulary: int) -> Tensor:
    """A copy of tokens on the host, checked by reading them, which torch.compile cannot record."""
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
