"""Updates of units in the backward pass: each as soon as its gradients are summed over ranks.

The factor of its gradients is 1, since losses were divided by the count of the step before the backward pass,
and without clipping. The squares of gradients add up to those of the step's norm, unit by unit.

The first step is rehearsed: its passes run once without updates, and again with them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
from torch import Tensor, nn

from echelon.parallel.data.gradients import squared_norm
from echelon.parallel.data.sharing import Sharing, SummedUnit
from echelon.state.ownership import LocalParameter
from echelon.update.numbers import Flag
from echelon.update.precision.stepper import Stepper, check_takes_units, with_gradients


@final
class UnitUpdates:
    """Hears of every unit of this rank whose gradients are summed, and updates it."""

    def __init__(self, sharings: Sequence[Sharing], stepper: Stepper) -> None:
        self._stepper = stepper
        self._square: Tensor | None = None
        self.start_passes(lambda: False, lambda: None)
        self.rehearsal: Rehearsal | None = None  # while a step is rehearsed
        self.has_updated = False  # whether weights are between those of before and after a step
        for sharing in sharings:
            sharing.update_in_backward(self._update)

    @contextmanager
    def rehearse(self, see: Callable[[Sequence[LocalParameter]], None]) -> Iterator[None]:
        """Inside, steps update nothing. `see`: looks at the gradients of each unit."""
        changed = self._stepper.changed()
        self.rehearsal = Rehearsal(self._stepper, see)
        try:
            yield
        finally:
            self.rehearsal.restore()
            self.rehearsal = None
            self._stepper.end_rehearsal(changed)

    def start_step(self, number: int) -> None:
        """Update `number` begins, counted from 0."""
        check_takes_units(self._stepper.optimizer)  # a hook may have been added
        self._square, self.has_updated = None, False
        if self.rehearsal is None:
            self._stepper.start_update(number)

    def start_passes(self, skip: Callable[[], Flag], before_unit: Callable[[], None]) -> None:
        """The passes of a step begin. `skip`, asked when a unit is complete: the update must change nothing,
        for want of samples. `before_unit` is called before its gradients are used."""
        self.skip, self._before_unit = skip, before_unit

    def finish_passes(self) -> None:
        """No layer runs any more in this step."""
        if self.rehearsal is not None:
            self.rehearsal.restore()

    def square(self, device: torch.device) -> Tensor:
        """The sum of squares of all gradients of the step that this rank counts."""
        return torch.zeros((), dtype=torch.float64, device=device) if self._square is None else self._square

    def _update(self, unit: SummedUnit) -> None:
        self._before_unit()
        if unit.norm_share:
            square = squared_norm(unit.norm_share, unit.norm_share[0].device)
            self._square = square if self._square is None else self._square + square
        if self.rehearsal is not None:
            with unit.present():
                self.rehearsal.use(unit)
            return
        self.has_updated = True
        with nullcontext() if self._stepper.on_host else unit.present():
            skip = self.skip()
            self._stepper.step(1.0, skip, unit.local)
            self._stepper.after_unit(unit.local, skip)


# A rehearsed step, where units are updated in the backward pass: its passes run, and nothing is updated.

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


# What is around a change of a unit's weights, and these; not its gradients, which would stay.
_Flipped = tuple[Callable[[], AbstractContextManager[None]], list[nn.Parameter]]


@final
class Rehearsal:
    """Hears of every unit whose gradients are summed, in place of an update."""

    def __init__(self, stepper: Stepper, see: Callable[[Sequence[LocalParameter]], None]) -> None:
        """`see`: looks at the gradients of a unit, which are freed afterwards."""
        self._stepper, self._see = stepper, see
        self._flipped: list[_Flipped] = []

    def use(self, unit: SummedUnit) -> None:
        self._see(unit.local)
        self._stepper.check_gradients(unit.local)
        weights = with_gradients(unit.local)
        for weight in weights:
            flip_bits(weight)
        self._flipped.append((unit.present, weights))

    def restore(self) -> None:
        """The passes are over: all weights are what they were."""
        while self._flipped:
            present, weights = self._flipped.pop()
            with present():
                for weight in weights:
                    flip_bits(weight)


def flip_bits(tensor: Tensor) -> None:
    """In place, and unseen by autograd. Zero becomes not-a-number."""
    real = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
    real.view(_INTEGERS[real.element_size()]).bitwise_not_()
