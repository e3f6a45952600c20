"""The learning rate of an optimizer, set by a schedule.

The engine and the server of asynchronous training use this one class, so that both agree. `verify` computes
the rate by itself: what is compared must not share the mistake.
"""

from collections.abc import Callable
from typing import final

import torch

Factor = Callable[[int], float]  # of a step, counted from 0


@final
class LearningRate:
    """The rate of each parameter group: its own rate when this was made, times the schedule's factor.

    rate = LearningRate(optimizer, cosine(total=1000))
    rate.set(step)              # before each update

    Without a schedule the groups keep their rates.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Factor | None) -> None:
        self._optimizer, self._schedule = optimizer, schedule
        self._base = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        """Set the rates for the update of `step`: how many updates came before it."""
        if self._schedule is None:
            return
        factor = self._schedule(step)
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor
