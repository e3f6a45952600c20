"""What an evaluation measures beside the loss, in the same forward: the number of right answers, say."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from echelon.errors import UserError
from echelon.plan import Plan

Measure = Callable[[Any, Any], Tensor]


@final
class Measuring:
    """Adds up a measure over the microbatches whose loss this rank computes."""

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self._measure: Measure | None = None

    @contextmanager
    def using(self, measure: Measure | None) -> Iterator[None]:
        """Inside, `add` measures; `total` begins at 0."""
        self.total = torch.zeros((), dtype=torch.float64)
        self._measure = measure
        try:
            yield
        finally:
            self._measure = None

    def add(self, output: Any, targets: Any, weight: int) -> None:
        """Of one microbatch; weight 0 if it only fills up."""
        if self._measure is None:
            return
        measured: Any = self._measure(output, targets)
        if not isinstance(measured, Tensor) or measured.numel() != 1:
            shown = list(measured.shape) if isinstance(measured, Tensor) else type(measured).__name__
            raise UserError(f"measure must return one number as a tensor, the total of a batch; got {shown}")
        self.total = self.total.to(measured.device) + measured.double().reshape(()) * weight


def check_measure(measure: Measure | None, plan: Plan) -> None:
    """Refuse a measure where ranks hold parts of an output."""
    if measure is not None and plan.tensor * plan.context > 1:
        raise UserError(
            f"evaluate(measure=…) with plan '{plan}': with tensor or context > 1 a rank holds parts of an "
            "output, which a measure cannot see; leave it out"
        )
