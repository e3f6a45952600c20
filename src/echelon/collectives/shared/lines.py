"""Operations under way, and the lines in which they keep their order.

An operation is a coroutine that runs until it needs something of a peer.
"""

import time
from collections import deque
from collections.abc import Coroutine
from typing import Any, NoReturn, Protocol, final

from echelon.collectives.group import Pending
from echelon.collectives.shared.slots import Pause
from echelon.launching import PeerLost

Steps = Coroutine[Any, None, None]


class Driver(Protocol):
    """What makes operations go on."""

    def finish(self, passage: "Passage", timeout: float) -> bool: ...
    def look(self, passage: "Passage") -> None: ...
    def go_on_behind(self, passage: "Passage") -> None: ...
    def over(self, passage: "Passage") -> None: ...
    def fail(self, error: Exception) -> None: ...


@final
class Passage(Pending):
    """One operation under way; `where` is for the message when a peer is lost."""

    def __init__(self, steps: Steps, where: str, timeout: float, driver: Driver) -> None:
        self._steps, self._where, self._timeout, self._driver = steps, where, timeout, driver
        self._done: float | None = None
        self.pause: Pause | None = None  # for what it waits
        self.behind = False  # whether it shall go on while its caller does other work
        self.error: Exception | None = None

    def is_over(self) -> bool:
        return self._done is not None

    def advance(self) -> bool:
        """Go on as far as possible; whether it is over."""
        try:
            self.pause = self._steps.send(None)
        except StopIteration:
            self._finish(None)
        except Exception as error:
            self._finish(error)
        return self._done is not None

    def abandon(self, error: Exception) -> None:
        self._steps.close()
        self._finish(error)

    def wait(self) -> None:
        if self._done is None and not self._driver.finish(self, self._timeout):
            late = PeerLost(
                f"{self._where} timed out waiting for its peers after {self._timeout:.0f} seconds"
            )
            self._driver.fail(late)
            raise late
        if self.error is not None:
            raise_from(self.error, self._where)

    def in_background(self) -> None:
        if self._done is None:
            self._driver.go_on_behind(self)

    def done(self) -> bool:
        if self._done is None:
            self._driver.look(self)
        return self._done is not None

    def done_at(self) -> float | None:
        return self._done

    def _finish(self, error: Exception | None) -> None:
        self.error, self._done = error, time.perf_counter()
        self._driver.over(self)


def raise_from(error: Exception, where: str) -> NoReturn:
    if isinstance(error, PeerLost):
        raise PeerLost(f"{where} lost a peer: {error}") from error
    raise error


class Line:
    """Operations that go one after the other; `number` counts those that are over.

    `at_once`: one is tried by its call already. `at_leisure`: nobody need hurry with what is not waited for.
    """

    def __init__(self, *, at_once: bool = False, at_leisure: bool = False) -> None:
        self.at_once, self.at_leisure = at_once, at_leisure
        self.waiting: deque[Passage] = deque()
        self.number = 0
        self.failure: Exception | None = None

    def advance(self) -> Exception | None:
        """Go on as far as possible; the error of one that failed, behind which nothing may go on."""
        while self.waiting and self.waiting[0].advance():
            self.number += 1
            if error := self.waiting.popleft().error:
                return error
        return None

    def wants_background(self) -> bool:
        """Whether something here should go on while its caller does other work."""
        if self.at_leisure:
            return False
        if len(self.waiting) == 1 and self.waiting[0].pause is Pause.AT_LEISURE:
            return False
        return any(passage.behind for passage in self.waiting)

    def fail(self, error: Exception) -> None:
        self.failure = error
        while self.waiting:
            self.waiting.popleft().abandon(error)
