"""Operations that have begun, and the queues that keep their order.

An operation is a coroutine that runs until it needs something from a peer.
"""

import time
import traceback
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, final

from echelon.collectives.shared.slots import Wait
from echelon.collectives.work import Work
from echelon.launching import PeerLost

if TYPE_CHECKING:
    from echelon.collectives.shared.progress_loop import ProgressLoop

Steps = Coroutine[Any, None, None]


@final
class Operation(Work):
    """One operation that has begun; `where` opens the message when a peer is lost."""

    def __init__(self, steps: Steps, where: str, timeout: float, runner: "ProgressLoop") -> None:
        self._steps, self._where, self._timeout, self._runner = steps, where, timeout, runner
        self._done_at: float | None = None
        self.wait_reason: Wait | None = None
        self.is_background = False  # whether it must advance while its caller does other work
        self.error: Exception | None = None

    def is_over(self) -> bool:
        return self._done_at is not None

    def advance(self) -> bool:
        """Advance as far as possible; whether it is over."""
        try:
            self.wait_reason = self._steps.send(None)
        except StopIteration:
            self._finish(None)
        except Exception as error:
            _forget_locals(error)
            self._finish(error)
        return self._done_at is not None

    def abandon(self, error: Exception) -> None:
        self._steps.close()
        self._finish(error)

    def wait(self) -> None:
        if self._done_at is None and not self._runner.wait_for(self, self._timeout):
            timed_out = PeerLost(
                f"{self._where} timed out waiting for its peers after {self._timeout:.0f} seconds"
            )
            self._runner.fail(timed_out)
            raise timed_out
        if self.error is not None:
            raise_from(self.error, self._where)

    def in_background(self) -> None:
        if self._done_at is None:
            self._runner.run_in_background(self)

    def done(self) -> bool:
        if self._done_at is None:
            self._runner.poll(self)
        return self._done_at is not None

    def done_at(self) -> float | None:
        return self._done_at

    def _finish(self, error: Exception | None) -> None:
        self.error, self._done_at = error, time.perf_counter()
        self._runner.wake_waiters(self)


def _forget_locals(error: BaseException) -> None:
    """Drop the variables in the error's traceback: kept, it would keep the link's memory too."""
    reason: BaseException | None = error
    while reason is not None:
        traceback.clear_frames(reason.__traceback__)
        reason = reason.__cause__ or reason.__context__


def raise_from(error: Exception, where: str) -> NoReturn:
    if isinstance(error, PeerLost):
        raise PeerLost(f"{where} lost a peer: {error}") from error
    raise error


class OperationQueue:
    """Operations that run one after the other; `number` counts those that are over.

    `starts_at_call`: the call itself advances an operation, before its caller waits. `is_lazy`: operations
    need not advance before their callers wait.
    """

    def __init__(self, *, starts_at_call: bool = False, is_lazy: bool = False) -> None:
        self.starts_at_call, self.is_lazy = starts_at_call, is_lazy
        self.operations: deque[Operation] = deque()
        self.number = 0
        self.failure: Exception | None = None

    def advance(self) -> Exception | None:
        """Advance as far as possible; return the error of a failed operation, after which nothing may run."""
        while self.operations and self.operations[0].advance():
            self.number += 1
            if error := self.operations.popleft().error:
                return error
        return None

    def needs_background(self) -> bool:
        """Return whether something here must advance while its caller does other work."""
        if self.is_lazy:
            return False
        if len(self.operations) == 1 and self.operations[0].wait_reason is Wait.FOR_READERS:
            return False
        return any(operation.is_background for operation in self.operations)

    def fail(self, error: Exception) -> None:
        self.failure = error
        while self.operations:
            self.operations.popleft().abandon(error)
