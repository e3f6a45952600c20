"""The learning rate of an optimizer, set by a schedule.

The engine and the server of asynchronous training use this one class, so that both agree. `verify` computes
the rate by itself: what is compared must not share the mistake.
"""

from collections.abc import Callable
from typing import final

import torch

from echelon.errors import UserError

Factor = Callable[[int], float]  # of a step, counted from 0


@final
class LearningRate:
    """The rate of each parameter group: its own rate when this was made, times the schedule's factor.

    rate = LearningRate(optimizer, cosine(total=1000))
    rate.set(step)              # before each update

    Without a schedule the groups keep their rates, or those of a scheduler of torch.optim.lr_scheduler.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Factor | None, *, by_step: bool = True
    ) -> None:
        """`by_step`: every step is one update, so that a scheduler which is told of steps can set rates."""
        self._optimizer, self._schedule, self._by_step = optimizer, schedule, by_step
        self._base = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        """Set the rates for the update of `step`: how many updates came before it."""
        self.check_scheduler()
        if self._schedule is None:
            return
        factor = self._schedule(step)
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor

    def check_scheduler(self) -> None:
        """Refuse a scheduler of torch beside another one, or where it cannot know which update is next."""
        if not hasattr(vars(self._optimizer).get("step"), "_wrapped_by_lr_sched"):
            return
        if self._schedule is not None:
            raise UserError(
                "a torch.optim.lr_scheduler and parallelize(schedule=…) both set the learning rate; use one"
            )
        if not self._by_step:
            raise UserError(
                "a torch.optim.lr_scheduler sets the rate of the next step, and with sync=async or a "
                "PipeDream schedule updates of several steps are under way; use parallelize(schedule=…), "
                "which sets that of each update"
            )
