"""Loss scaling for fp16: the backward pass starts from the loss times a scale.

An fp16 number below 6e-8 is zero, and most gradients are small; times 65,536 they are not. Above 65,504 it is
infinite: then the scale was too large, and the step is skipped on all ranks. With the default of "dynamic":

    gradients   not finite   finite, 2,000 times   finite
    scale            65536                 32768    65536
    update         skipped                  made     made

The scale divides what a loss is divided by anyway (its normaliser), which updates take back without another
pass over gradients. State is plain numbers, or tensors on a device, which are not read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from echelon.update.numbers import Flag, Number, choose

SMALLEST = 1.0  # no dynamic scale falls below: a smaller one would only lose gradients


@dataclass(frozen=True)
class DynamicScale:
    """Starts at `start`; divided by `factor` after a step whose gradients were not finite, and multiplied by
    it after `interval` steps in a row whose gradients were."""

    start: float = 2.0**16
    factor: float = 2.0
    interval: int = 2000


LossScale = float | Literal["dynamic"] | DynamicScale


class ScaleState(NamedTuple):
    """The scale, and the steps with finite gradients since it last changed."""

    scale: Number
    good_steps: Number


@final
class LossScaling:
    def __init__(self, choice: LossScale, device: torch.device | None = None) -> None:
        """`choice`: a number for a scale that stays. `device`: where the state is, if not on the host."""
        self._rule = DynamicScale() if choice == "dynamic" else choice
        start = self._rule.start if isinstance(self._rule, DynamicScale) else float(self._rule)
        numbers: list[Number] = [start, 0.0]
        if device is not None:
            numbers = [torch.full((), each, dtype=torch.float64, device=device) for each in (start, 0.0)]
        self.state = ScaleState(*numbers)

    @property
    def scale(self) -> Number:
        return self.state.scale

    def counters(self) -> dict[str, Number]:
        """Return the numbers that a training needs to go on, by name."""
        return {"loss scale": self.state.scale, "good steps": self.state.good_steps}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Go on with the scale of a checkpoint, if there is one. A scale that the user has set stays."""
        if not isinstance(self._rule, DynamicScale) or "loss scale" not in numbers:
            return
        new = float(numbers["loss scale"]), float(numbers["good steps"])
        self.state = ScaleState(*(_like(old, value) for old, value in zip(self.state, new, strict=True)))

    @property
    def smallest(self) -> float:
        """The scale cannot fall below this; skipped steps there are not the scale's fault."""
        return SMALLEST if isinstance(self._rule, DynamicScale) else float(self._rule)

    def after_step(self, *, overflows: Flag, refused: Flag) -> None:
        """A step is over: its gradients were not finite, or were, or it was `refused` for another reason."""
        if not isinstance(self._rule, DynamicScale):
            return
        if not isinstance(self.state.scale, Tensor):  # flags of PipeDream's sums are tensors on a CPU too
            overflows, refused = bool(overflows), bool(refused)
        self.state = _next_state(self.state, self._rule, overflows, refused)


def _like(old: Number, value: float) -> Number:
    return torch.full_like(old, value) if isinstance(old, Tensor) else value


def _next_state(state: ScaleState, rule: DynamicScale, overflows: Flag, refused: Flag) -> ScaleState:
    """Return the state after a step, without reading numbers of a device."""
    scale, good = state
    grows = good + 1 >= rule.interval
    smaller = scale / rule.factor
    smaller = choose(smaller < SMALLEST, SMALLEST, smaller)
    after = ScaleState(choose(grows, scale * rule.factor, scale), choose(grows, 0.0, good + 1))
    after = ScaleState(choose(refused, scale, after.scale), choose(refused, good, after.good_steps))
    return ScaleState(choose(overflows, smaller, after.scale), choose(overflows, 0.0, after.good_steps))


def make_loss_scaling(
    choice: LossScale | None, precision: str, device: torch.device | None = None
) -> LossScaling | None:
    """Return the loss scaling of a precision: only fp16 has gradients that are too small for it."""
    if precision != "fp16":
        return None
    return LossScaling("dynamic" if choice is None else choice, device)


def loss_scale_errors(choice: object, precision: str | None) -> list[str]:
    """Why a training cannot scale its losses so. `precision`: the plan's, if it is known."""
    if choice is None:
        return []
    errors = []
    if isinstance(choice, DynamicScale):
        if not _is_number(choice.start) or choice.start < SMALLEST:
            errors.append(f"loss_scale: DynamicScale(start={choice.start!r}): must be a number, at least 1")
        if not _is_number(choice.factor) or choice.factor <= 1:
            errors.append(f"loss_scale: DynamicScale(factor={choice.factor!r}): must be a number above 1")
        if not isinstance(choice.interval, int) or isinstance(choice.interval, bool) or choice.interval < 1:
            errors.append(
                f"loss_scale: DynamicScale(interval={choice.interval!r}): must be a number of steps"
            )
    elif choice != "dynamic" and not (_is_number(choice) and choice > 0):  # type: ignore[operator]
        errors.append(f"loss_scale={choice!r}: must be 'dynamic', a number above 0, or a DynamicScale")
    if precision not in (None, "fp16"):
        errors.append(
            f"loss_scale={choice!r} precision={precision}: only losses of fp16 are scaled, others have the "
            "range of float32; drop loss_scale, or use precision=fp16"
        )
    return errors


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
