"""The update of weights that stand in host memory (offload=parameters): one unit after the other.

    fetch     | unit 0 | unit 1 | unit 2 |
    update             | unit 0 | unit 1 | unit 2 |
    store                       | unit 0 | unit 1 | unit 2 |

So the device never has more of them than in the passes. Gradients and the optimizer's state stay where they
are.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.parallel.data import Sharing
from echelon.state.checkpoint import SavedParameter
from echelon.state.ownership import LocalParameter, OwnedSlice
from echelon.update.precision import Stepper
from echelon.update.precision.optimizer_call import Factor, Skip
from echelon.update.precision.stepper import takes_units


@final
class ParametersStepper(Stepper):
    """Another stepper, called for what each sharing brings to the device in turn."""

    def __init__(self, stepper: Stepper, sharings: Sequence[Sharing]) -> None:
        _check_takes_turns(stepper.optimizer)
        self.optimizer, stepper.by_unit = stepper.optimizer, True
        self._stepper, self._sharings = stepper, list(dict.fromkeys(sharings))

    def start_update(self, number: int) -> None:
        self._stepper.start_update(number)

    def step(self, factor: Factor, skip: Skip = False, unit: Sequence[LocalParameter] | None = None) -> None:
        """A `unit` that somebody gives is on the device."""
        if unit is not None:
            self._stepper.step(factor, skip, unit)
            return
        _check_takes_turns(self.optimizer)  # somebody may have added a hook
        for sharing in self._sharings:
            for present in sharing.pieces_to_update():
                self._stepper.step(factor, skip, present)

    def check_gradients(self, unit: Sequence[LocalParameter]) -> None:
        self._stepper.check_gradients(unit)

    def state(self, local: LocalParameter) -> dict[str, Tensor]:
        return self._stepper.state(local)

    def load(self, local: LocalParameter, saved: SavedParameter) -> None:
        self._stepper.load(local, saved)

    def changed(self) -> list[LocalParameter]:
        return self._stepper.changed()

    def take_over(self, local: Sequence[LocalParameter]) -> None:
        self._stepper.take_over(local)

    def updated_tensors(self) -> list[tuple[str, nn.Parameter]]:
        return self._stepper.updated_tensors()

    @property
    def whole_parts(self) -> frozenset[str]:
        return self._stepper.whole_parts

    def held_whole(self) -> list[OwnedSlice]:
        return self._stepper.held_whole()


def _check_takes_turns(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that must see all weights at once."""
    if not takes_units(optimizer):
        raise UserError(
            f"optimizer {type(optimizer).__name__} with offload=parameters: its step() is called once for "
            "each unit, while the unit's weights are on the device, which is right only for optimizers that "
            "update each parameter by itself, and whose steps nobody watches by a hook or replaces; use one "
            "of torch's, drop the hooks, or drop offload=parameters"
        )
