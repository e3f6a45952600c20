"""Lines of metrics.jsonl that are on their way: a checkpoint has those that are not in the file yet.

    rank 0 tells of step 8  →  rank 0 saves step 8  →  the parent is killed before it has written the line

Then a run that goes on from step 8 writes the line that its checkpoint has.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from echelon.train.events import Evaluated, Event, Stepped
from echelon.train.metrics_file import line_of, step_of

_MANY = 1000  # lines: more wait only if nobody asks for them, because the pipe to the parent holds less
_OTHER_LINES = 1 << 14  # bytes that rollbacks may take between them


@final
class UnwrittenLines:
    """On rank 0: what it told, as far as `path` does not have it."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, list[str]()

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def add(self, event: Event) -> None:
        if isinstance(event, Stepped | Evaluated):
            self._lines.append(line_of(event))
            if len(self._lines) % _MANY == 0:
                self._forget_written()

    def as_plain(self) -> list[str]:
        self._forget_written()
        return list(self._lines)

    def restore(self, value: Any) -> None:
        """What `as_plain` has made; what cannot be read is left out."""
        lines = value if isinstance(value, list) else []
        self._lines = [line for line in lines if isinstance(line, str) and step_of(line) is not None]

    def _forget_written(self) -> None:
        """Keep the lines from the first step on that has one to write: the parent writes them in order."""
        written = self._last_written()
        number = max((index + 1 for index, line in enumerate(self._lines) if line in written), default=0)
        self._lines = _of_whole_steps(self._lines, number)

    def _last_written(self) -> set[str]:
        size = sum(len(line) + 1 for line in self._lines) + _OTHER_LINES
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - size))
                return set(file.read().decode(errors="replace").splitlines())
        except FileNotFoundError:
            return set()


def _of_whole_steps(lines: Sequence[str], first: int) -> list[str]:
    """Those from number `first` on, and those of the same step before it."""
    while 0 < first < len(lines) and step_of(lines[first - 1]) == step_of(lines[first]):
        first -= 1
    return list(lines[first:])
