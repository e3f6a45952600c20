"""Which number a step has, how many steps have made an update, and which of them may still turn out refused.

The learning rate and the masks of dropout belong to the number of a step. On a device a step may turn out to
be refused after the next one has begun, with the next number. So a refused step keeps its number, on a CPU
too: no two updates share one, and a training goes on alike wherever it runs.

    step      first   refused   next
    number        0         1      2
    updates       1         1      2
"""

from collections import deque
from typing import final

from echelon.errors import UserError
from echelon.runtime import StepNumbers


@final
class StepCounter:
    """Counts the steps of one engine."""

    def __init__(self) -> None:
        self.begun = 0  # also the number of the next step
        self._num_refused = 0
        self._unchecked: deque[StepNumbers] = deque()

    @property
    def updates(self) -> int:
        """Steps that have made an update, as far as is known."""
        return self.begun - self._num_refused

    def add(self, numbers: StepNumbers) -> None:
        """A step is done, or queued on a device."""
        self.begun += 1
        self._unchecked.append(numbers)

    def late_error(self, *, but: int = 0) -> UserError | None:
        """The first error of steps that nobody has checked; the last `but` are left for later."""
        first: UserError | None = None
        while len(self._unchecked) > but:
            error = self._unchecked.popleft().error()
            if error is not None:
                self._num_refused += 1
                first = first or error  # also where somebody has read it: elsewhere nobody may have
        return first
