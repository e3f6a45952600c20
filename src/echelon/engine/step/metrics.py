"""The results of a step and of an evaluation: numbers that are the same on every rank."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.collectives.agreement import gather_values
from echelon.errors import UserError
from echelon.parallel.observer import LossPass, StepObserver
from echelon.plan import Plan
from echelon.update.numbers import StepNumbers


@final
class StepTimer:
    """The duration of a step: on the host, or on a CUDA device from its first kernel to its last."""

    def __init__(self, device: torch.device) -> None:
        """Starts."""
        self._start = time.perf_counter()
        self._seconds: float | None = None
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()

    def stop(self) -> None:
        if self._events:
            self._events[1].record()
        else:
            self._seconds = time.perf_counter() - self._start

    @property
    def is_ready(self) -> bool:
        """True if `seconds` returns without waiting for the device. Only after `stop`."""
        return not self._events or self._events[1].query()

    def seconds(self) -> float:
        """Waits for the device, where the step was on one."""
        if self._seconds is None:
            start, end = self._events
            end.synchronize()
            self._seconds = start.elapsed_time(end) / 1000
            self._events = []
        return self._seconds


@final
class Metrics:
    """One training step, over the global batch.

    `loss` is the mean over everything the loss counted, with the `auxiliary_loss` of all gates, which are
    functions of the global batch too; `grad_norm` the norm of its gradient before
    clipping, `tokens` that count, `seconds` this rank's time. `skipped`: gradients were not finite under
    precision=fp16, or these or the loss with nonfinite="skip", so that the step left weights and optimizer
    state as they are, on all ranks; `grad_norm` is infinite then, or the loss is not finite. `loss_scale` is
    what fp16 multiplied the loss by; elsewhere 1. `measured` is what `step(batch, measure)` has measured.

    On a CUDA device `engine.step` returns before the step is done. Reading any number waits for it; to keep
    the device busy, read those of a step when the next one has begun, or once in many steps. Reading one of a
    refused step raises its error. `repr` does neither: it shows what is known.
    """

    __slots__ = ("_numbers", "_seconds", "measured")

    def __init__(self, numbers: StepNumbers, seconds: StepTimer | float, measured: "Measured" = None) -> None:
        self._numbers, self._seconds, self.measured = numbers, seconds, measured

    @property
    def loss(self) -> float:
        outcome = self._numbers.read()
        return outcome.total / outcome.counted + outcome.auxiliary

    @property
    def auxiliary_loss(self) -> float:
        """The part of `loss` that the gates of a mixture of experts have added; 0 without any."""
        return self._numbers.read().auxiliary

    @property
    def grad_norm(self) -> float:
        return self._numbers.read().norm

    @property
    def tokens(self) -> int:
        return round(self._numbers.read().counted)

    @property
    def seconds(self) -> float:
        return self._seconds.seconds() if isinstance(self._seconds, StepTimer) else self._seconds

    @property
    def skipped(self) -> bool:
        return self._numbers.read().num_skipped > 0

    @property
    def loss_scale(self) -> float:
        return self._numbers.read().loss_scale

    @property
    def is_ready(self) -> bool:
        """True if the step is done, so that reading a number does not wait for the device."""
        timed = not isinstance(self._seconds, StepTimer) or self._seconds.is_ready
        return timed and self._numbers.is_ready

    def as_named_tuple(self) -> "MetricValues":
        """The numbers themselves; waits for the device."""
        return MetricValues(self.loss, self.grad_norm, self.tokens, self.seconds, self.skipped)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metrics) and self.as_named_tuple() == other.as_named_tuple()

    def __hash__(self) -> int:
        return hash(self.as_named_tuple())

    def __repr__(self) -> str:
        if not self.is_ready:
            return "Metrics(not read yet)"
        error = self._numbers.error()
        if error is not None:
            return f"Metrics(refused: {error})"
        return repr(self.as_named_tuple()).replace("MetricValues", "Metrics", 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return Metrics, (self._numbers, self.seconds, self.measured)


class MetricValues(NamedTuple):
    """The numbers of `Metrics`, read."""

    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    skipped: bool


Measured = float | dict[str, float] | None  # a mean, or means by name


class Evaluation(NamedTuple):
    """The mean loss over a global batch, how many tokens (or samples) it was taken over, and the mean of what
    else was measured, or means by name."""

    loss: float
    tokens: int
    measured: Measured = None


# What is measured beside the loss, in the same forward: the share of right answers, say.

Measure = Callable[[Any, Any], Any]
See = Callable[[LossPass], tuple[Any, Any] | None]

_UNNAMED = ""  # the name of a measure that is no dict


@final
class Measuring(StepObserver):
    """Adds up a measure over the microbatches whose loss this rank computes."""

    def __init__(self, measure: Measure | None, see: "See | None" = None) -> None:
        """`see` returns the output and targets to measure, or None where another rank does."""
        self.sums: dict[str, Tensor] = {}  # (total, count) by name
        self._measure, self._see = measure, see or (lambda loss: (loss.output, loss.targets))

    def before_step(self) -> None:
        self.sums.clear()  # of passes that come before those of the step: an audit, a rehearsal

    def after_loss(self, loss: LossPass) -> None:
        if self._measure is None or not loss.counts:  # a microbatch that only fills up does not count
            return
        seen = self._see(loss)
        if seen is None:
            return
        measured = self._measure(*seen)
        for name, value in (measured if isinstance(measured, Mapping) else {_UNNAMED: measured}).items():
            total, count = _pair(name, value, loss.num_samples)
            pair = torch.stack([total, count.to(total.device)])
            self.sums[name] = self.sums[name] + pair if name in self.sums else pair


def agree_on_means(sums: Mapping[str, Tensor], group: Group, device: torch.device) -> Measured:
    """The means over what all ranks of a group have measured; stages without a loss know no names."""
    totals: dict[str, tuple[float, float]] = {}
    for of_rank in gather_values({name: pair.tolist() for name, pair in sums.items()}, group, device):
        for name, (total, count) in of_rank.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + total, before[1] + count)
    means = {name: total / count if count else math.nan for name, (total, count) in totals.items()}
    return means.get(_UNNAMED) if set(means) <= {_UNNAMED} else means


def check_measure(measure: Measure | None, plan: Plan, *, trains: bool = False) -> None:
    """Refuse a measure where ranks must not wait for each other."""
    if measure is not None and trains and plan.sync == "async":
        raise UserError(
            f"measure=… with plan '{plan}': with sync=async workers train without waiting for each other, "
            "and a mean over all of them would make them wait; measure in engine.evaluate(batch, measure)"
        )


def _pair(name: object, value: Any, num_samples: int) -> tuple[Tensor, Tensor]:
    """Return what one microbatch measured, as (total, count) in float64."""
    whose = f"measure's {name!r}" if name != _UNNAMED else "measure"
    if not isinstance(name, str):
        raise UserError(f"{whose}: the keys of a dict that a measure returns must be strings")
    if isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value)):
        total, count = map(_in_float64, value)
        return total, count
    if not _is_number(value):
        raise UserError(
            f"{whose} must return a mean over its samples, a pair (total, count), or a dict of these by "
            f"name, each one number; got {_shown(value)}"
        )
    if not (value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)):
        raise UserError(
            f"{whose} returned {_shown(value)}: an integer is a total, and of how many is not known; return "
            "(total, count), or a mean"
        )
    return _in_float64(value) * num_samples, _in_float64(num_samples)


def _in_float64(number: Tensor | float) -> Tensor:
    return torch.as_tensor(number, dtype=torch.float64).reshape(())


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {list(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
