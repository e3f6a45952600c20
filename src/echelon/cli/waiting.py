"""What a command says while it computes for long: how long it takes, and how much of that is left."""

import time
from types import TracebackType

from rich.console import Console

from echelon.quantities import show_seconds

_FIRST_LOOK, _WORTH_SAYING = 1.0, 5.0  # seconds


class Waiting:
    """`with Waiting("splitting", advice) as wait: compute(progress=wait.progress)`, on standard error."""

    def __init__(self, activity: str, advice: str, console: Console | None = None) -> None:
        self._activity, self._advice = activity, advice
        self._console = console or Console(stderr=True, highlight=False)
        self._status = self._console.status(f"{activity} …")
        self._began = time.monotonic()
        self._said = False

    def __enter__(self) -> "Waiting":
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def progress(self, done: float) -> None:
        """Say once how long all of it takes; then, on a terminal, how much is left."""
        elapsed = time.monotonic() - self._began
        if elapsed < _FIRST_LOOK or done <= 0:
            return
        total = elapsed / done
        if not self._said and total > _WORTH_SAYING:
            self._console.print(
                f"{self._activity} takes about {show_seconds(total)}; {self._advice}", markup=False
            )
        self._said = True
        self._status.update(f"{self._activity}: {done:.0%}, about {show_seconds(total - elapsed)} left")
