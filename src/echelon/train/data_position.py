"""The position of a training in its data, as plain data that a checkpoint keeps.

Batches are functions of their number (data/sampler.py). Without a rollback, step s trains batch s − 1. After
one, the batches that led to it are left out, and numbers of steps and of batches are no longer the same:

    step      1  2  3  4  ×     back to 2, without batches 2 to 4     3  4  5
    batch     0  1  2  3  4                                           5  6  7
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

from echelon.errors import UserError

Range = tuple[int, int]  # the first batch, and the one after the last


@final
@dataclass(frozen=True)
class DataPosition:
    """The number of the next batch, and those that are never trained (again), in rising order."""

    next_batch: int = 0
    skipped: tuple[Range, ...] = ()

    @classmethod
    def after_steps(cls, steps: int, skipped: Iterable[Range] = ()) -> "DataPosition":
        """Return the position of a training after so many steps."""
        ranges = _united(skipped)
        batch = steps
        for begin, end in ranges:
            if batch < begin:
                break
            batch += end - begin
        return cls(batch, ranges)

    def skip(self, begin: int, end: int) -> "DataPosition":
        """Leave out the batches from `begin` to before `end`; the next one is not before them."""
        ranges = _united([*self.skipped, (begin, end)])
        inside = [stop for start, stop in ranges if start <= self.next_batch < stop]
        return DataPosition(inside[0] if inside else self.next_batch, ranges)

    def with_others(self, steps: int, skipped: Iterable[Range]) -> "DataPosition":
        """The place after `steps`, without these batches too; a UserError if some of them were trained."""
        together = DataPosition.after_steps(steps, [*self.skipped, *skipped])
        expected = self.next_batch
        for begin, end in together.skipped:
            expected = end if begin <= expected < end else expected
        if expected != together.next_batch:
            raise UserError(
                f"the checkpoint of step {steps} goes on with batch {self.next_batch} and leaves out "
                f"{list(self.skipped)}; with all that the run leaves out, {list(together.skipped)}, it would "
                f"be batch {together.next_batch}"
            )
        return together

    def as_plain(self) -> dict[str, Any]:
        return {"next_batch": self.next_batch, "skipped": [list(each) for each in self.skipped]}

    @classmethod
    def parse(cls, value: Any) -> "DataPosition":
        """Read what `as_plain` has made; anything else is a UserError."""
        given: dict[str, Any] = value if isinstance(value, dict) else {}
        listed = given.get("skipped")
        is_listed = isinstance(listed, list) and all(
            isinstance(each, list | tuple) and len(each) == 2 and all(map(_is_number, each))
            for each in listed
        )
        ranges = tuple((begin, end) for begin, end in listed or ()) if is_listed else ((0, 0),)
        position = cls(given.get("next_batch", -1), ranges)
        if not _is_number(position.next_batch) or position.skipped != _united(position.skipped):
            raise UserError(
                "the position in the data must have next_batch, a number from 0, and skipped, pairs of such "
                "numbers in rising order; this is not what a training has saved"
            )
        return position


def _united(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted, with those that touch or overlap made one."""
    result: list[Range] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        if result and begin <= result[-1][1]:
            begin, end = result[-1][0], max(end, result.pop()[1])
        result.append((begin, end))
    return tuple(result)


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
