"""Silence: when is it too long, which rank is to blame, and what was every rank doing.

`Watch` holds the clock; the rest are pure functions of the pulses that were read.
"""

import time
from collections.abc import Collection, Sequence

from echelon.launching.pulse import Board, Pulse


class Watch:
    """Tells when no rank has given a sign of life for `deadline` seconds (None: never)."""

    def __init__(self, board: Board, deadline: float | None) -> None:
        self._board = board
        self._deadline = deadline
        self._seen = board.read()
        self._since = time.monotonic()

    @property
    def period(self) -> float | None:
        """How long the parent may wait before it looks again."""
        return None if self._deadline is None else min(self._deadline / 10, 1.0)

    @property
    def silence(self) -> str:
        """What there was too much of, in words."""
        return f"no rank gave a sign of life for {self._deadline:g} s"

    def sign_of_life(self) -> None:
        self._since = time.monotonic()

    def too_silent(self) -> bool:
        """Look at the slots once more."""
        if self._deadline is None:
            return False
        pulses = self._board.read()
        if pulses != self._seen:
            self._seen = pulses
            self.sign_of_life()
        return time.monotonic() - self._since > self._deadline


def rank_to_blame(pulses: Sequence[Pulse], returned: Collection[int]) -> tuple[int, str]:
    """The rank that the others seem to wait for, and why it is that one ('rank 1 …').

    First a rank that works while others wait; then one that has returned while others wait; then the
    one that is furthest behind. Where nothing tells the ranks apart, the lowest.
    """

    def suspicion(rank: int) -> tuple[int, int]:
        pulse = pulses[rank]
        return 1 if rank in returned else 2 if pulse.waits else 0, pulse.entered

    rank = min(range(len(pulses)), key=suspicion)
    if len(pulses) > 1 and len({suspicion(each) for each in range(len(pulses))}) == 1:
        return rank, "is only the first of ranks that are all equally far"
    return rank, f"seems to hold the others up: it {doing(pulses[rank], rank in returned)}"


def doing(pulse: Pulse, returned: bool) -> str:
    """'waits in all_reduce data (operation 12)': follows 'rank 0 …' or 'it …'."""
    if returned:
        return f"has returned, after {_operations(pulse.left)}"
    if pulse.waits:
        return f"waits in {pulse.name} (operation {pulse.entered})"
    return f"works outside any operation, after {_operations(pulse.left)}"


def _operations(count: int) -> str:
    return "1 operation" if count == 1 else f"{count} operations"
