"""Sums over parts of parameters, and over the ranks that hold the other parts.

Each statistic of a parameter (its sums over rows, say) is kept for the whole parameter, on every rank that
holds a part of it. A rank adds up what it has, part by part, in its place:

    whole 3 × 4      rank 0      rank 1            sums of rows, over both
    a a a a          a a a a                       4a
    a a b b          a a         b b        →      2a + 2b
    b b b b                      b b b b           4b

All statistics lie in one buffer, so that one message serves all parameters. Ranks lay it out alike: also for
parameters of which they hold nothing, whose zeros change no sum and no maximum of squares.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from itertools import accumulate, zip_longest
from math import prod
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives import Group, Reduction

Shape = tuple[int, ...]
Box = tuple[slice, ...]


def whole_box(dims: Sized) -> Box:
    """All of a parameter that has so many dims."""
    return (slice(None),) * len(dims)


class Part(NamedTuple):
    """What one tensor, which an optimizer updates, is of a whole parameter.

    `views` are those of a tensor like it (its gradient, say): one for each of the `boxes`, in its shape.
    """

    number: int  # of the parameter, in its Exchange
    boxes: Sequence[Box]
    views: Callable[[Tensor], list[Tensor]]


class Round(NamedTuple):
    """The ranks of `group` hold other parts of the first `num_parameters`, but for the first `skipped`."""

    group: Group
    num_parameters: int
    skipped: int = 0


class Exchange(NamedTuple):
    """Whole parameters in an order that all ranks share, and what this rank has of them."""

    shapes: Sequence[Shape]
    parts: Mapping[Tensor, Part]
    rounds: Sequence[Round]
    dtype: torch.dtype  # of statistics
    device: torch.device


def without_ranks(parameters: Iterable[Tensor]) -> list[Exchange]:
    """Exchanges of parameters that are whole here, one for each device and type."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        kinds.setdefault((parameter.device, dtype), []).append(parameter)
    return [
        Exchange(
            [tuple(p.shape) for p in of_kind],
            {p: Part(index, [whole_box(p.shape)], lambda t: [t]) for index, p in enumerate(of_kind)},
            (),
            dtype,
            device,
        )
        for (device, dtype), of_kind in kinds.items()
    ]


@final
class StatisticsBuffer:
    """Statistics of all parameters of an exchange, in one memory; `shapes` says which a parameter has."""

    def __init__(self, exchange: Exchange, shapes: Callable[[Shape], list[Shape]]) -> None:
        self._rounds = exchange.rounds
        wanted = [shapes(whole) for whole in exchange.shapes]
        sizes = [prod(shape) for of_one in wanted for shape in of_one]
        self._memory = torch.zeros(sum(sizes), dtype=exchange.dtype, device=exchange.device)
        views = iter(self._memory.split(sizes))
        self._views = [[next(views).view(shape) for shape in of_one] for of_one in wanted]
        self._ends = [0, *accumulate(sum(map(prod, of_one)) for of_one in wanted)]

    @property
    def dtype(self) -> torch.dtype:
        return self._memory.dtype

    def clear(self) -> None:
        self._memory.zero_()

    def __getitem__(self, index: int) -> list[Tensor]:
        """The statistics of a parameter, whole."""
        return self._views[index]

    def reduce(self, op: Reduction) -> None:
        """Sums, or maxima, over the ranks that hold other parts."""
        for group, end, begin in self._rounds:
            with group.ledger.about("optimizer"):
                group.all_reduce(self._memory[self._ends[begin] : self._ends[end]], op)


def add_in_turns(targets: Sequence[Sequence[Tensor]], values: Sequence[Sequence[Tensor]]) -> None:
    """Add values to targets, those of each parameter one after the other: its boxes may share rows."""
    _in_turns(torch._foreach_add_, targets, values)


def maximum_in_turns(targets: Sequence[Sequence[Tensor]], values: Sequence[Sequence[Tensor]]) -> None:
    """The larger of target and value, into the target; in turns, as sums are."""
    _in_turns(torch._foreach_maximum_, targets, values)


def _in_turns(
    operation: Callable[[list[Tensor], list[Tensor]], None],
    targets: Sequence[Sequence[Tensor]],
    values: Sequence[Sequence[Tensor]],
) -> None:
    for in_turn, of_turn in zip(zip_longest(*targets), zip_longest(*values), strict=True):
        pairs = [pair for pair in zip(in_turn, of_turn, strict=True) if pair[0] is not None]
        operation([target for target, _ in pairs], [value for _, value in pairs])
