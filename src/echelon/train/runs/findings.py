"""The errors of a job that were found so far, and the keys that are invalid.

A rule between values is checked only if each value is valid on its own: with `steps=0` the warm-up is not
reported as too long.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from echelon.errors import UserError

T = TypeVar("T")


@dataclass
class Findings:
    """The errors so far, and the invalid keys."""

    invalid: set[str]
    errors: list[str] = field(default_factory=list)

    def add(self, error: str, *keys: str) -> None:
        self.errors.append(error)
        self.invalid.update(keys)

    def all_valid(self, *keys: str) -> bool:
        """Whether each of `keys` is valid, with its table and what it contains."""
        return not any(
            f"{key}.".startswith(f"{bad}.") or bad.startswith(f"{key}.")
            for key in keys
            for bad in self.invalid
        )

    def attempt(self, make: Callable[[], T], where: str, *keys: str) -> T | None:
        """The result of `make`, or None with its errors added under `where`."""
        try:
            return make()
        except UserError as refusal:
            for error in refusal.errors or (refusal.title,):
                self.add(f"{where}: {error}", *keys)
            return None
