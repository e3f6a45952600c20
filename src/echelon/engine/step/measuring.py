"""What an evaluation measures beside the loss, in the same forward: the share of right answers, say.

A measure returns a mean over the samples that it is given, or (total, count), or a dict of these by name.
Means are weighted by samples, totals and counts are added up, over microbatches and replicas: the result is
that of the whole batch at once, whatever the plan.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.collectives.agreement import gather_values
from echelon.errors import UserError
from echelon.plan import Plan

Measure = Callable[[Any, Any], Any]

_UNNAMED = ""  # the name of a measure that is no dict


@final
class Measuring:
    """Adds up a measure over the microbatches whose loss this rank computes."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}  # (total, count) by name
        self._measure: Measure | None = None

    @contextmanager
    def using(self, measure: Measure | None) -> Iterator[None]:
        """Inside, `add` measures; `sums` begin at 0."""
        self.sums, self._measure = {}, measure
        try:
            yield
        finally:
            self._measure = None

    def add(self, output: Any, targets: Any, num_samples: int, *, counts: bool) -> None:
        """Of one microbatch of so many samples; one that only fills up does not count."""
        if self._measure is None or not counts:
            return
        measured = self._measure(output, targets)
        for name, value in (measured if isinstance(measured, Mapping) else {_UNNAMED: measured}).items():
            total, count = _pair(name, value, num_samples)
            pair = torch.stack([total, count.to(total.device)])
            self.sums[name] = self.sums[name] + pair if name in self.sums else pair


def agree_on_means(
    sums: Mapping[str, Tensor], group: Group, device: torch.device
) -> float | dict[str, float] | None:
    """The means over what all ranks of a group have measured; stages without a loss know no names."""
    totals: dict[str, tuple[float, float]] = {}
    for of_rank in gather_values({name: pair.tolist() for name, pair in sums.items()}, group, device):
        for name, (total, count) in of_rank.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + total, before[1] + count)
    means = {name: total / count if count else math.nan for name, (total, count) in totals.items()}
    return means.get(_UNNAMED) if set(means) <= {_UNNAMED} else means


def check_measure(measure: Measure | None, plan: Plan) -> None:
    """Refuse a measure where ranks hold parts of an output."""
    if measure is not None and plan.tensor * plan.context > 1:
        raise UserError(
            f"evaluate(measure=…) with plan '{plan}': with tensor or context > 1 a rank holds parts of an "
            "output, which a measure cannot see; leave it out"
        )


def _pair(name: object, value: Any, num_samples: int) -> tuple[Tensor, Tensor]:
    """What one microbatch measured, as (total, count) in float64."""
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
