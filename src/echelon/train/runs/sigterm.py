"""SIGTERM of the process that has started the ranks of this machine: it goes on to them, and they save."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from echelon.launching import Ranks
from echelon.train.runs.stop_request import on_sigterm


@final
class Sigterm:
    """SIGTERM goes on to the ranks, when all of them handle it; another one, later, is what it was before."""

    def __init__(self) -> None:
        self.came = False
        self.is_forwarded = False  # to all ranks: they have begun, and save
        self.is_answered = False  # all is saved: another one has nothing to end
        self._ranks: Ranks | None = None
        self._listeners: set[int] = set()

    def __enter__(self) -> "Sigterm":
        self._is_heard = threading.current_thread() is threading.main_thread()
        if self._is_heard:
            self._before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, on_sigterm(self._forward, self._give_back))
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_heard:
            signal.signal(signal.SIGTERM, self._before)

    @contextmanager
    def forwarded_to(self, ranks: Ranks) -> Iterator[None]:
        self._ranks, self._listeners = ranks, set()
        try:
            yield
        finally:
            self._ranks = None

    def add_listener(self, rank: int) -> None:
        """From now on this rank handles the signal, which may have come before."""
        self._listeners.add(rank)
        if self.came:
            self._forward()

    def _forward(self) -> None:
        self.came = True
        if self._ranks is not None and len(self._listeners) == self._ranks.size:
            self.is_forwarded = True
            self._ranks.send_signal(signal.SIGTERM)

    def _give_back(self) -> None:
        if not self.is_answered:
            signal.signal(signal.SIGTERM, self._before)
            signal.raise_signal(signal.SIGTERM)
