"""Losses that jump: which of them are a reason to go back to a checkpoint. Pure: it sees numbers alone.

    losses    3.1  3.0  2.9  3.0  2.9    41.0
    factor=4       median 3.0            a spike: more than 4 × 3.0

A loss is judged when `window` finite ones came before it. Those that are spikes, and those of steps that were
skipped, are not among them.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, final


class Trouble(NamedTuple):
    """Steps `first` to `last` went wrong: one by a spike, or several by numbers that are not finite."""

    first: int
    last: int
    reason: str


@final
class SpikeWatch:
    """Judges the losses of a training, one step after the other."""

    def __init__(self, factor: float, window: int, losses: Iterable[float] = ()) -> None:
        """`factor` 0: nothing is a spike. `losses`: those of the last steps, of a training that goes on."""
        self._factor = factor
        self._losses: deque[float] = deque(losses, maxlen=window)

    @property
    def is_on(self) -> bool:
        return self._factor > 0

    def judge(self, step: int, loss: float) -> Trouble | None:
        """What is wrong with the loss of a step that was not skipped."""
        if not self.is_on:
            return None
        if not math.isfinite(loss):
            return Trouble(step, step, f"the loss of step {step} is {loss:g}")
        median = statistics.median(self._losses) if len(self._losses) == self._losses.maxlen else math.inf
        if loss > self._factor * median:
            times = f"{self._factor:g} × {median:.4g}, the median of the last {len(self._losses)}"
            return Trouble(step, step, f"the loss of step {step}, {loss:.4g}, is more than {times}")
        self._losses.append(loss)
        return None

    def as_plain(self) -> list[float]:
        return list(self._losses)

    def restore(self, value: Any) -> None:
        """What `as_plain` has made; without anything that can be read, losses are gathered again."""
        losses = value if isinstance(value, list) else []
        self._losses.clear()
        self._losses.extend(float(each) for each in losses if _is_loss(each))


def _is_loss(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
