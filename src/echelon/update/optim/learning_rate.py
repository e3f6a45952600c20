"""The learning rate of an optimizer, set by a schedule: the factor of a step, a pure function of its number.

    constant   ╱▔▔▔▔▔▔▔▔     warm-up, then 1 forever
    cosine     ╱▔╲__         warm-up, then half a cosine down to `floor`
    wsd        ╱▔▔▔▔▔╲_      warm-up, stable at 1, then down to `floor` over the last `decay` steps

The engine and the server of asynchronous training use one class, so that both agree. A schedule holds no
optimizer and counts no steps: a resumed run has nothing to restore. `verify` computes the rate by itself:
what is compared must not share the mistake.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch

from echelon.errors import UserError, did_you_mean, raise_errors

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


# How far the factor has fallen (0 … 1) after each part (0 … 1) of the decay. wsd uses the square root: it
# falls fast at first, and trained to a lower loss than a straight line in "Scaling Laws and Compute-Optimal
# Training Beyond Fixed Training Durations" (Hägele and others, 2024).
_FALLEN: dict[str, Callable[[float], float]] = {
    "cosine": lambda part: (1 - math.cos(math.pi * part)) / 2,
    "wsd": math.sqrt,
}

NAMES = ("constant", "cosine", "wsd")


@dataclass(frozen=True)
class Schedule:
    """Warm-up, stable, decay: every schedule is these three parts, some of them empty.

        schedule = cosine(total=1000, warmup=100)
        LearningRate(optimizer, schedule).set(step)     # step counts from 0

    Made, and checked, by `constant`, `cosine`, `wsd` and `by_name`.
    """

    name: str
    total: int | None  # None: no end
    warmup: int
    decay: int
    floor: float

    def __call__(self, step: int) -> float:
        # No step of the run has a factor of 0: the first step of the warm-up has 1 / warmup, and the floor is
        # reached at step `total`, the first after the run.
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.total is None:
            return 1.0
        if step >= self.total:
            return self.floor
        into_decay = step - (self.total - self.decay)
        if into_decay <= 0:
            return 1.0
        return 1 - (1 - self.floor) * _FALLEN[self.name](into_decay / self.decay)


def constant(warmup: int = 0) -> Schedule:
    """Linear warm-up, then 1 until the run ends."""
    raise_errors("schedule 'constant'", _errors(None, warmup, None, None))
    return Schedule("constant", None, warmup, 0, 1.0)


def cosine(total: int, warmup: int = 0, floor: float = 0.1) -> Schedule:
    """Linear warm-up, then half a cosine from 1 to `floor` over the rest of the `total` steps."""
    raise_errors("schedule 'cosine'", _errors(total, warmup, None, floor))
    return Schedule("cosine", total, warmup, total - warmup, floor)


def wsd(total: int, warmup: int = 0, decay: int | None = None, floor: float = 0.0) -> Schedule:
    """Linear warm-up, stable at 1, then 1 - √ to `floor` over the last `decay` steps.

    By default, `decay` is a fifth of `total`, or what the warm-up leaves of it.
    """
    raise_errors("schedule 'wsd'", _errors(total, warmup, decay, floor))
    if decay is None:
        decay = min(total // 5, total - warmup)
    return Schedule("wsd", total, warmup, decay, floor)


def by_name(
    name: str, total: int, warmup: int = 0, decay: int | None = None, floor: float | None = None
) -> Schedule:
    """The schedule of a job file. `decay` and `floor` default to the values of the schedule."""
    raise_errors(f"schedule '{name}'", schedule_errors(name, total, warmup, decay, floor))
    if name == "constant":
        return constant(warmup)
    if name == "cosine":
        return cosine(total, warmup) if floor is None else cosine(total, warmup, floor)
    return wsd(total, warmup, decay) if floor is None else wsd(total, warmup, decay, floor)


def schedule_errors(
    name: str | None, total: int | None, warmup: int, decay: int | None, floor: float | None
) -> list[str]:
    """Every error of the arguments of `by_name`; a name or total of None is not checked."""
    errors = []
    if name is not None and name not in NAMES:
        errors.append(f"'{name}' is not known{did_you_mean(name, NAMES)}")
    if decay is not None and name in ("constant", "cosine"):
        errors.append(f"decay={decay}: only wsd has it; leave it out, or use wsd")
    if floor is not None and name == "constant":
        errors.append(f"floor={floor}: constant does not decay; leave it out, or use cosine or wsd")
    return errors + _errors(total, warmup, decay, floor)


def _errors(total: int | None, warmup: int, decay: int | None, floor: float | None) -> list[str]:
    """Every error of these numbers; None is for one that the schedule does not have."""
    leasts = (("total", total, 1), ("warmup", warmup, 0), ("decay", decay, 0))
    errors = [
        f"{name}={value}: must be an integer, at least {least}"
        for name, value, least in leasts
        if value is not None and not (isinstance(value, int) and value >= least)
    ]
    # Their sum is checked only if each number is valid.
    if not errors and total is not None and warmup + (decay or 0) > total:
        parts = f"warmup={warmup}" if decay is None else f"warmup={warmup} and decay={decay}"
        errors.append(f"{parts}: more steps than total={total}; lower them, or raise total")
    if floor is not None and not 0 <= floor <= 1:
        errors.append(f"floor={floor}: must be between 0 and 1, a part of the full rate")
    return errors
