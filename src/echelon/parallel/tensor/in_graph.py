"""The entries and exits of a split layer inside the graphs of torch.compile.

torch records a function that is allowed in a graph as one node, and then runs it on tensors without memory
to find the operators and their gradients. So the code is that of `regions`, with collectives that are
operators; and modules with the same hidden states share an entry there as they do elsewhere.

All engines of a process share compiled code, and a function of an engine would be recorded as a constant. So
these are functions of the module, and the group is data.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.parallel.tensor.entries import Entries, LastEntry
from echelon.parallel.tensor.operators import RecordedMoves, number_of

_last = LastEntry()  # of the graph that is being recorded


class RecordedGroup(NamedTuple):
    """A group as graphs know it."""

    number: Tensor
    ranks: int
    rank: int

    @classmethod
    def of(cls, group: Group) -> "RecordedGroup":
        _allow_in_graph()
        return cls(number_of(group), group.size, group.rank)


def enter(
    x: Tensor, number: Tensor, ranks: int, rank: int, sequence: bool, dim: int | None, to_matrices: bool
) -> Tensor:
    return _entries(number, ranks, rank, sequence).enter(x, dim, to_matrices)


def leave(x: Tensor, number: Tensor, ranks: int, rank: int, sequence: bool, dim: int | None) -> Tensor:
    return _entries(number, ranks, rank, sequence).leave(x, dim)


def total(x: Tensor, number: Tensor, ranks: int, rank: int) -> Tensor:
    return _entries(number, ranks, rank, False).total(x)


def join_logits(logits: Tensor, number: Tensor, ranks: int, rank: int) -> Tensor:
    return _entries(number, ranks, rank, False).join_logits(logits)


def _entries(number: Tensor, ranks: int, rank: int, sequence: bool) -> Entries:
    return Entries(RecordedMoves(number, ranks, rank), _last, sequence=sequence)


@cache
def _allow_in_graph() -> None:
    """Not when this is imported: it imports the compiler, which takes seconds."""
    for function in (enter, leave, total, join_logits):
        torch.compiler.allow_in_graph(function)
