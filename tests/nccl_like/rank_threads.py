"""Ranks as threads of this process. One runs at a time, until it waits for something that the others do.

So a deadlock needs no timeout: it is there when nobody can run and somebody waits. Who runs next makes no
difference to the outcome if an operation, once possible, stays possible whatever else completes before it.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from random import Random
from typing import Protocol, TypeVar

from echelon.launching import PeerLost

Result = TypeVar("Result")


class Deadlock(Exception):  # noqa: N818
    """Every rank that has not ended waits, and nothing that they wait for can happen."""


class Condition(Protocol):
    """What a rank waits for; its text is shown when it never happens."""

    @property
    def is_complete(self) -> bool: ...


class RankThreads(ABC):
    """`run(fn)` calls `fn(rank)` on every rank, and returns what each returned."""

    def __init__(self, size: int, seed: int | None = None) -> None:
        """`seed`: choose who runs next at random; else ranks take turns."""
        self.size = size
        self._random = None if seed is None else Random(seed)
        self._turns = [threading.Lock() for _ in range(size)]  # released for the rank that may run
        for turn in self._turns:
            turn.acquire()
        self._waits: list[Condition | None] = [None] * size
        self._ended: set[int] = set()
        self._failure: BaseException | None = None

    def run(self, fn: Callable[[int], Result]) -> list[Result]:
        """The first error of a rank ends the others and is raised here. A world runs once."""
        results: dict[int, Result] = {}

        def main(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                results[rank] = fn(rank)
            except BaseException as error:
                self._failure = self._failure or error
            self._ended.add(rank)
            self._pass_turn(rank)

        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(self.size)]

    def wait(self, rank: int, condition: Condition) -> None:
        """Let others run until the condition is complete. Raises Deadlock in every rank if it never is."""
        self._raise_failure()
        if condition.is_complete:
            return
        self._waits[rank] = condition
        self._pass_turn(rank)
        self._turns[rank].acquire()
        self._waits[rank] = None
        self._raise_failure()

    @abstractmethod
    def describe(self, rank: int) -> list[str]:
        """What else to show of a rank in the report of a deadlock, line by line."""

    def _pass_turn(self, rank: int) -> None:
        following = self._next_after(rank)
        if following is None and len(self._ended) < self.size:
            self._failure = Deadlock(self._report())
            following = self._next_after(rank)
        if following is not None:
            self._turns[following].release()

    def _next_after(self, rank: int) -> int | None:
        """A rank that can run: its condition is complete, or it must learn that all is lost."""
        order = [(rank + distance) % self.size for distance in range(1, self.size + 1)]
        if self._random is not None:
            self._random.shuffle(order)
        for other in order:
            condition = self._waits[other]
            can_run = condition is None or condition.is_complete or self._failure is not None
            if can_run and other not in self._ended:
                return other
        return None

    def _raise_failure(self) -> None:
        if isinstance(self._failure, Deadlock):
            raise Deadlock(*self._failure.args)
        if self._failure is not None:
            raise PeerLost("another rank has failed") from self._failure

    def _report(self) -> str:
        lines = ["every rank waits, and no operation can complete"]
        for rank, condition in enumerate(self._waits):
            state = "has ended" if rank in self._ended else f"waits for {condition}"
            lines += [f"rank {rank} {state}", *(f"    {line}" for line in self.describe(rank))]
        return "\n".join(lines)
