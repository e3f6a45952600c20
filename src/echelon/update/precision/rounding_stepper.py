"""Updates of bf16 weights without masters (masters=false): rounded stochastically.

    some weights, as float32  →  the optimizer's update  →  rounded to bf16  →  the next weights

A portion of the weights at a time has float32 copies; they are gone before the next ones are made. The
optimizer's state stays float32.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import nn

from echelon.state.ownership import LocalParameter
from echelon.update.optim.local import Make, make_local
from echelon.update.precision.flat_memory import flat_views
from echelon.update.precision.float32_gradients import as_float32
from echelon.update.precision.optimizer_call import Factor, Skip
from echelon.update.precision.rounding import KeyedRounding, Placement
from echelon.update.precision.stepper import (
    LocalStepper,
    by_parameter,
    copy_all,
    takes_portions,
    with_gradients,
    without_memory,
)

_PORTION = 64 * 2**20  # bytes of float32 copies, whatever the model's size; or those of one weight


@final
class RoundingStepper(LocalStepper):
    """The optimizer works on float32 copies of some weights at a time, which are then rounded."""

    def __init__(
        self,
        make: Make,
        parameters: Sequence[nn.Parameter],
        local: list[LocalParameter],
        placements: Mapping[nn.Parameter, Placement],
        rounding: KeyedRounding,
        *,
        deferred: bool = False,
    ) -> None:
        """`placements`: of what is updated of each local parameter."""
        self._local, self._placements, self._rounding = local, placements, rounding
        self._copies = {each.tensor: nn.Parameter(without_memory(each.tensor)) for each in local}
        self._without_memory = {weight: copy.data for weight, copy in self._copies.items()}
        copies = [each._replace(tensor=self._copies[each.tensor]) for each in local]
        optimizer = make_local(make, parameters, by_parameter(local, copies))
        super().__init__(optimizer, deferred=deferred)

    def start_update(self, number: int) -> None:
        self._rounding.start_update(number)

    def step(self, factor: Factor, skip: Skip = False, unit: Sequence[LocalParameter] | None = None) -> None:
        weights = with_gradients(self._local if unit is None else unit)
        if not takes_portions(self.optimizer):
            self._step(weights, factor, skip)
            return
        skip = self._call.readable(skip)
        for portion in _portions(weights):
            self._step(portion, factor, skip)

    def _step(self, weights: Sequence[nn.Parameter], factor: Factor, skip: Skip) -> None:
        copies = [self._copies[weight] for weight in weights]
        self._fill(weights, copies)
        for copy, gradient in zip(copies, as_float32(weights, copies), strict=True):
            copy.grad = gradient
        self._call(copies, factor, skip)
        for weight, copy in zip(weights, copies, strict=True):
            self._rounding.round(weight, copy, self._placements[weight])
            copy.grad = None
            copy.data = self._without_memory[weight]

    @torch.no_grad()
    def _fill(self, weights: Sequence[nn.Parameter], copies: Sequence[nn.Parameter]) -> None:
        memory = flat_views([weight.detach() for weight in weights], torch.float32)
        copy_all(memory, weights)
        for copy, view in zip(copies, memory, strict=True):
            copy.data = view

    def updated(self, local: LocalParameter) -> nn.Parameter:
        return self._copies[local.tensor]


def _portions(weights: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    portion: list[nn.Parameter] = []
    taken = 0
    for weight in weights:
        size = weight.numel() * torch.float32.itemsize
        if portion and taken + size > _PORTION:
            yield portion
            portion, taken = [], 0
        portion.append(weight)
        taken += size
    if portion:
        yield portion
