"""Whether ranks gather and reduce the same units in the same order, as they must where weights are sharded.

In the first step they compare before each message: a rank that runs other modules than its peers (experts
chosen by data, layers that are left out at random) is found before a message meets the wrong one. Later
steps compare nothing in between: a message that meets the wrong one is an error of the group, and ranks that
got each other's weights refuse the step (`Residency.compare`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.collectives.shared.header import MismatchError
from echelon.data_parallel.problems import Problem
from echelon.errors import UserError


@final
class GatherAgreement:
    """What the ranks of a group are about to do. `is_open`: they compare it first."""

    def __init__(self, group: Group, units: Sequence[str], device: torch.device, *, is_open: bool) -> None:
        self._group, self._device = group, device
        names = [f"module '{unit}'" if unit else "the model itself" for unit in units]
        self._actions = ["has finished a pass"]
        self._actions += [f"gathers the weights of {name}" for name in names]
        self._actions += [f"reduces the gradients of {name}" for name in names]
        self._num_units = len(units)
        self.is_open = is_open

    def gather(self, unit: int) -> None:
        self._compare(1 + unit)

    def reduce(self, unit: int) -> None:
        self._compare(1 + self._num_units + unit)

    def finish_pass(self) -> None:
        self._compare(0)

    def _compare(self, action: int) -> None:
        """Raise, on every rank of the group, unless all are about to do the same."""
        if not self.is_open:
            return
        with self._group.ledger.about("agreement"):
            extremes = torch.tensor([action, -action], device=self._device)
            self._group.all_reduce(extremes, "max")
            highest, lowest = extremes.tolist()
            if highest != -lowest:
                actions = torch.empty(self._group.size, dtype=torch.int64, device=self._device)
                self._group.all_gather(actions, torch.tensor([action], device=self._device))
                raise UserError(self._difference(actions))

    def _difference(self, actions: Tensor) -> str:
        numbers = actions.tolist()
        other = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        first, second = self._actions[numbers[0]], self._actions[numbers[other]]
        axis = self._group.axis
        return f"{Problem.DIFFERENT_UNITS.value} (rank 0 along {axis} {first}, and rank {other} {second})"


@contextmanager
def explain_mismatch() -> Iterator[None]:
    """A message that meets another one comes from ranks that run different modules."""
    try:
        yield
    except MismatchError as error:
        raise UserError(f"{Problem.DIFFERENT_UNITS.value} ({error})") from error
