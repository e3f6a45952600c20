"""The errors of a launch that loses a rank. A user's mistake is an `echelon.errors.UserError`.

`failure.py` and `hang.py` decide which rank is named.
"""

from collections.abc import Sequence


class PeerLost(RuntimeError):  # noqa: N818 (says what happened)
    """A rank cannot continue because another rank is gone or failed: a consequence, never the root cause."""


class RankFailed(RuntimeError):  # noqa: N818 (says what happened)
    """One rank ended the run. `rank` is the root cause; `others` has a line about each other rank."""

    def __init__(self, rank: int, reason: str, traceback: str = "", others: Sequence[str] = ()) -> None:
        self.rank = rank
        self.reason = reason
        self.traceback = traceback
        self.others = tuple(others)
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [f"rank {self.rank} {self.reason}", *(f"  {line}" for line in self.others)]
        if self.traceback:
            lines += ["", self.traceback.rstrip()]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[type["RankFailed"], tuple[int, str, str, tuple[str, ...]]]:
        return type(self), (self.rank, self.reason, self.traceback, self.others)


class RankHung(RankFailed):
    """No rank gave a sign of life within the deadline. `traceback` holds the stacks of every rank."""
