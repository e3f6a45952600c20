"""Who may go on: how many steps each worker has made, and how far apart they may be. Holds no lock."""

from collections.abc import Sequence
from typing import final


@final
class Clocks:
    """The steps that workers have completed. None may start more than `staleness` ahead of the slowest.

    A worker that rests (it waits for all others to rest too) or is gone holds nobody up.
    """

    def __init__(self, workers: int, staleness: float) -> None:
        self._staleness = staleness
        self._completed = [0] * workers
        self._resting: set[int] = set()
        self._gone: set[int] = set()

    def may_start(self, worker: int, step: int) -> bool:
        others = [self._completed[other] for other in self._stepping() if other != worker]
        return step - min(others, default=step) <= self._staleness

    def complete(self, worker: int, step: int) -> None:
        self._completed[worker] = step + 1

    def restore(self, completed: Sequence[int]) -> None:
        """Every worker has completed so many steps."""
        self._completed = list(completed)

    def awaited(self, step: int) -> set[int]:
        """The workers whose push of `step` is still to come: those further on have made theirs."""
        return {worker for worker in self._stepping() if self._completed[worker] <= step}

    def rest(self, worker: int) -> None:
        self._resting.add(worker)

    def leave(self, worker: int) -> None:
        self._gone.add(worker)
        self._resting.discard(worker)

    @property
    def all_rest(self) -> bool:
        return not self._stepping()

    def wake(self) -> set[int]:
        """All who rest go on; returns who they were."""
        woken, self._resting = self._resting, set()
        return woken

    @property
    def all_gone(self) -> bool:
        return len(self._gone) == len(self._completed)

    def _stepping(self) -> set[int]:
        return set(range(len(self._completed))) - self._resting - self._gone
