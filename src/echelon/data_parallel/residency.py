"""Residency: which units are whole when the weights themselves are shared out.

A unit is whole while something uses it, and for a while before: on entering a unit, the next `prefetch` ones
are gathered too, in the order of the last forward pass, or its reverse on the way back. So at most
prefetch + 1 units are whole at a time, beside units that surround others or are tied to them.
"""

from collections.abc import Sequence

from echelon.collectives import Ledger
from echelon.data_parallel.flat import FlatUnit


class Residency:
    """Gathers and frees units as they are entered and left. A unit may be memory of several kinds."""

    def __init__(
        self, units: Sequence[list[FlatUnit]], needs: list[list[int]], prefetch: int, ledger: Ledger
    ) -> None:
        self._units, self._needs, self._prefetch, self._ledger = units, needs, prefetch, ledger
        self._users = [0] * len(units)
        self._sequence = list(range(len(units)))
        self._trace: list[int] = []

    @property
    def num_whole(self) -> int:
        """How many units have memory for their whole weights now."""
        return sum(any(flat.whole for flat in unit) for unit in self._units)

    def reset(self) -> None:
        """Free everything: between steps, and after one that failed."""
        if self._trace:
            self._sequence = list(dict.fromkeys(self._trace))
            self._trace = []
        self._users = [0] * len(self._units)
        for index in range(len(self._units)):
            self._free(index)

    def enter(self, index: int, *, backward: bool) -> None:
        """Return when all that unit `index` needs is whole; the next units are on their way."""
        if not backward:
            self._trace.append(index)
        for need in self._needs[index]:
            self._users[need] += 1
            self._gather(need)
        for following in self._following(index, backward):
            self._gather(following)
        for need in self._needs[index]:
            for flat in self._units[need]:
                flat.settle()

    def leave(self, index: int) -> None:
        """Free what nobody uses any more."""
        for need in self._needs[index]:
            self._users[need] -= 1
            if self._users[need] == 0:
                self._free(need)

    def _following(self, index: int, backward: bool) -> list[int]:
        if index not in self._sequence:
            return []
        ahead = list(reversed(self._sequence)) if backward else self._sequence
        place = ahead.index(index)
        return ahead[place + 1 : place + 1 + self._prefetch]

    def _gather(self, index: int) -> None:
        with self._ledger.about("parameters"):
            for flat in self._units[index]:
                flat.gather()

    def _free(self, index: int) -> None:
        for flat in self._units[index]:
            flat.free()
