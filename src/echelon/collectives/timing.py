"""How the ledger learns the times of one operation: read from the host's clock, or from events on a device.

`cuda_timing.py` has the second way.
"""

import time
from abc import ABC, abstractmethod
from typing import final

from echelon.collectives.ledger import Ledger, Move
from echelon.collectives.work import Work


class Timing(ABC):
    """Measures one operation. Make it before the operation is issued."""

    @abstractmethod
    def overlap(self, work: Work) -> None:
        """The operation is issued, and its caller does other work before it waits."""

    @abstractmethod
    def wait(self, work: Work, move: Move, ledger: Ledger) -> None:
        """Wait for the operation, and enter its times into the ledger, now or later."""


@final
class HostTiming(Timing):
    """Where `wait` returns when the operation is complete: the host's clock says all. Has no state."""

    def overlap(self, work: Work) -> None:
        pass

    def wait(self, work: Work, move: Move, ledger: Ledger) -> None:
        since = time.perf_counter()
        work.wait()
        ledger.finish(move, waited_since=since, done=work.done_at())


HOST_TIMING = HostTiming()
