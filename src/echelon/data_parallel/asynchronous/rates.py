"""The learning rate of an update: a schedule over versions, since workers have no step in common."""

from collections.abc import Callable
from typing import final

import torch


@final
class Rates:
    """Sets the rate of every parameter group to its base rate times the schedule's factor."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Callable[[int], float] | None) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._base = [group["lr"] for group in optimizer.param_groups]

    def set(self, version: int) -> None:
        """For the update that is made of `version`."""
        if self._schedule is not None:
            factor = self._schedule(version)
            for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
                group["lr"] = base * factor
