"""Work: an operation that a group has begun, and how its times are measured.

The times come from the host's clock, or from events on a device (`cuda_timing.py`).
"""

import time
from abc import ABC, abstractmethod
from typing import final

from echelon.collectives.ledger import Ledger, Move


class Work(ABC):
    """An operation that a subclass of Group has begun."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the operation is complete; over NCCL, when the current stream waits for it."""

    def in_background(self) -> None:  # noqa: B027 (most operations advance anyway)
        """Advance it while its caller does other work."""

    def done_at(self) -> float | None:
        """Return when it was complete (time.perf_counter); None if only the return of `wait` is known."""
        return None

    def done(self) -> bool:
        """Return whether it is known to be complete; does not wait."""
        return False


class Timing(ABC):
    """Measures one operation. Make it before the operation is issued."""

    @abstractmethod
    def overlap(self, work: Work) -> None:
        """Note that the operation is issued, and that its caller does other work before it waits."""

    @abstractmethod
    def wait(self, work: Work, move: Move, ledger: Ledger) -> None:
        """Wait for the operation, and enter its times into the ledger, now or later."""


@final
class HostTiming(Timing):
    """For operations whose `wait` returns at completion: the host's clock says all. Has no state."""

    def overlap(self, work: Work) -> None:
        pass

    def wait(self, work: Work, move: Move, ledger: Ledger) -> None:
        since = time.perf_counter()
        work.wait()
        ledger.finish(move, waited_since=since, done=work.done_at())


HOST_TIMING = HostTiming()
