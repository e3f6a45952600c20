"""Errors that speak to the user: the rule, the values, the fix; all errors of an input at once.

`UserError` is the only error that commands print without a traceback (exit code 2). What cannot
happen is an `assert`; what a peer or the machine does to us has its own class beside the code that
sees it.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave. `errors` holds one full sentence for each."""

    def __init__(self, title: str, errors: Iterable[str] = ()) -> None:
        self.title = title
        self.errors = tuple(errors)
        super().__init__("\n".join([title, *(f"  - {error}" for error in self.errors)]))

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, tuple[str, ...]]]:
        return type(self), (self.title, self.errors)


def raise_errors(subject: str, errors: list[str]) -> None:
    """Raise one UserError that lists every error of `what`, if there is any.

    raise_errors("plan 'data=0'", ["data=0: must be an integer, at least 1"])
    """
    if errors:
        count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
        raise UserError(f"{count} in {subject}:", errors)


def did_you_mean(word: str, listed: Iterable[str]) -> str:
    """' (did you mean 'data'?)' when a known word is near, else the known words."""
    listed = list(listed)
    near = difflib.get_close_matches(word, listed, n=1, cutoff=0.6)
    return f" (did you mean '{near[0]}'?)" if near else f"; known: {', '.join(listed)}"
