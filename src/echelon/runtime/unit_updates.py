"""Updates of units in the backward pass: each as soon as its gradients are summed over ranks.

The factor of its gradients is 1, since losses were divided by the count of the step before the backward pass,
and nobody clips. The squares of gradients add up to those of the step's norm, unit by unit.

What the first step shows of a model must be known before a weight changes. So the first step is rehearsed:
its passes run once without updates, and again with them.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from echelon.data_parallel import Sharing, SummedUnit, squared_norm
from echelon.ownership import LocalParameter
from echelon.precision import Stepper


@final
class UnitUpdates:
    """Hears of every unit of this rank whose gradients are summed, and updates it."""

    def __init__(self, sharings: Sequence[Sharing], stepper: Stepper) -> None:
        self._stepper = stepper
        self._square: Tensor | None = None
        # Whether the update must change nothing, for want of samples; asked when a unit is complete.
        self.skip: Callable[[], bool | Tensor] = lambda: False
        self.on_unit: Callable[[], None] = lambda: None  # before its gradients are used
        # Sees the gradients of a rehearsal.
        self.rehearsal: Callable[[Sequence[LocalParameter]], None] | None = None
        for sharing in sharings:
            sharing.on_unit = self._update

    def start_step(self) -> None:
        self._square = None
        if self.rehearsal is None:
            self._stepper.start_update()

    def square(self, device: torch.device) -> Tensor:
        """The sum of squares of all gradients of the step that this rank counts."""
        return torch.zeros((), dtype=torch.float64, device=device) if self._square is None else self._square

    def _update(self, unit: SummedUnit) -> None:
        self.on_unit()
        if unit.norm_share:
            square = squared_norm(unit.norm_share, unit.norm_share[0].device)
            self._square = square if self._square is None else self._square + square
        if self.rehearsal is None:
            self._stepper.step(1.0, self.skip(), unit.local)
        else:
            self.rehearsal(unit.local)
