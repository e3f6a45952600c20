"""A rehearsed step, where units are updated in the backward pass: its passes run, and nothing is updated.

What the first step shows of a model must be known before a weight changes. So its passes run once like this,
and again with updates.

Until the passes are over, a unit that would have been updated has other weights: all their bits are flipped.
That takes no memory, and is undone to the last bit. A layer that runs again in the backward pass (recompute),
and reads a weight that is updated by then, returns something else, and is refused for it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.parallel.data import SummedUnit
from echelon.state.ownership import LocalParameter
from echelon.update.precision import Stepper, with_gradients

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class _Flipped(NamedTuple):
    """Weights of a unit, and what is around a change of them; not its gradients, which would stay."""

    present: Callable[[], AbstractContextManager[None]]
    weights: list[nn.Parameter]


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
        self._flipped.append(_Flipped(unit.present, weights))

    def restore(self) -> None:
        """The passes are over: all weights are what they were."""
        while self._flipped:
            flipped = self._flipped.pop()
            with flipped.present():
                for weight in flipped.weights:
                    flip_bits(weight)


def flip_bits(tensor: Tensor) -> None:
    """In place, and unseen by autograd. Zero becomes not-a-number."""
    real = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
    real.view(_INTEGERS[real.element_size()]).bitwise_not_()
