"""The number of a step, the count of updates, and the steps that may still turn out refused.

The learning rate and the masks of dropout belong to the number of a step. On a device a step may turn out to
be refused after the next one has begun, with the next number. So a refused step keeps its number, on a CPU
too: no two updates share one, and a training goes on alike wherever it runs.

    step      first   refused   next   skipped   next
    number        0         1      2         3      4
    updates       1         1      2         2      3

A skipped step is no error: gradients were not finite, of fp16 or where such steps are skipped in every
precision (nonfinite.py). Many in a row are one, if no smaller loss scale is left to hope for.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import final

from echelon.errors import UserError
from echelon.update.nonfinite import NonfiniteError, NonfiniteRule
from echelon.update.numbers import Outcome, StepNumbers
from echelon.update.precision.loss_scaling import LossScaling

MOST_SKIPPED = 20  # steps in a row at the smallest loss scale


@final
class StepCounter:
    """Counts the steps of one engine."""

    def __init__(
        self, *, smallest_scale: float = 1.0, skips_steps: bool = True, most_skipped: int | None = None
    ) -> None:
        """`smallest_scale`: below which no loss scale falls. `skips_steps`: a skipped update is its step's
        only one. `most_skipped`: so many in a row are an error, in any precision."""
        self.begun = 0  # also the number of the next step
        self.skipped = 0  # steps with a skipped update, as far as is known
        self._num_refused = self._num_in_row = 0
        self._took_other_way = False  # a step that was checked
        self._smallest_scale, self._skips_steps = smallest_scale, skips_steps
        self._most_skipped = most_skipped
        self._unchecked: deque[StepNumbers] = deque()

    @classmethod
    def of(cls, scaling: LossScaling | None, rule: NonfiniteRule, *, flushes: bool) -> "StepCounter":
        smallest = 1.0 if scaling is None else scaling.smallest
        return cls(smallest_scale=smallest, skips_steps=flushes, most_skipped=rule.most_skipped)

    @property
    def is_near_limit(self) -> bool:
        """True if the next step may be the one too many, should the unchecked ones have been skipped."""
        in_row = self._num_in_row + len(self._unchecked) + 1
        return self._most_skipped is not None and in_row >= self._most_skipped

    @property
    def is_in_row(self) -> bool:
        """True if the last step that was checked was skipped."""
        return self._num_in_row > 0

    @property
    def updates(self) -> int:
        """Steps that have made an update, as far as is known."""
        return self.begun - self._num_refused - (self.skipped if self._skips_steps else 0)

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Go on counting from a checkpoint's numbers."""
        self.begun = int(numbers["begun steps"])
        self.skipped = int(numbers.get("skipped steps", 0))
        skipped = self.skipped if self._skips_steps else 0
        self._num_refused = self.begun - int(numbers["steps"]) - skipped
        self._num_in_row = 0
        self._unchecked.clear()

    def add(self, numbers: StepNumbers) -> None:
        """A step is done, or queued on a device."""
        self.begun += 1
        self._unchecked.append(numbers)

    def late_error(self, *, but: int = 0) -> UserError | None:
        """Return the first error of unchecked steps; the last `but` are left for later."""
        first: UserError | None = None
        while len(self._unchecked) > but:
            numbers = self._unchecked.popleft()
            error = numbers.error()
            self._took_other_way |= bool(numbers.outcome.other_ways)
            if error is not None:
                self._num_refused += 1
            else:
                error = self._check_skipped(numbers.outcome)
            first = first or error  # even if read here: other ranks may not have read it
        return first

    def pop_other_way(self) -> bool:
        """Return whether a step that was checked since the last call took another way through the model."""
        popped, self._took_other_way = self._took_other_way, False
        return popped

    def _check_skipped(self, outcome: Outcome) -> UserError | None:
        """Count a skipped step; an error if no smaller loss scale is left to hope for."""
        if not outcome.num_skipped:
            self._num_in_row = 0
            return None
        self.skipped += 1
        is_smallest = outcome.loss_scale <= self._smallest_scale
        if self._most_skipped is not None:
            self._num_in_row += is_smallest or not math.isfinite(outcome.total + outcome.counted)
            return self._count_to(self._most_skipped)
        self._num_in_row += is_smallest
        if self._num_in_row < MOST_SKIPPED:
            return None
        self._num_in_row = 0
        return UserError(
            f"gradients were not finite in {MOST_SKIPPED} steps in a row at loss scale "
            f"{outcome.loss_scale:g}, below which it does not fall: the loss, or what it is computed of, is "
            "not finite, or fp16 cannot hold it; lower the learning rate, set clip, check the batches, use "
            "loss_scale='dynamic' if it is a number, or use precision=bf16"
        )

    def _count_to(self, limit: int) -> NonfiniteError | None:
        if self._num_in_row < limit:
            return None
        self._num_in_row = 0
        return NonfiniteError.of(limit, self.begun - len(self._unchecked) - 1)
