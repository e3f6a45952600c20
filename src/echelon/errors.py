"""Errors for the user: the rule, the values, the fix; all errors of an input at once.

`UserError` is the only error that commands print without a traceback (exit code 2). What cannot happen is an
`assert`. Failures of a peer or of the machine have their own classes, beside the code that detects them.
"""

import difflib
from collections.abc import Iterable

_MOST_SHOWN = 100  # errors of one input: a stranger's file can have a million


class UserError(ValueError):
    """Mistakes in the user's input. `errors` has one full sentence for each.

    Half a character, which JSON can hold, is shown as \\ud800, so that a message can always be written.
    """

    def __init__(self, title: str, errors: Iterable[str] = ()) -> None:
        self.title = printable(title)
        self.errors = tuple(map(printable, errors))
        super().__init__("\n".join([title, *(f"  - {error}" for error in self.errors)]))

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, tuple[str, ...]]]:
        return type(self), (self.title, self.errors)


class DamagedError(UserError):
    """A file is missing, or not what was written: no later try will find it whole."""


def printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def raise_errors(subject: str, errors: list[str]) -> None:
    """Raise one UserError that lists every error of `subject`, if there is any.

    raise_errors("plan 'data=0'", ["data=0: must be an integer, at least 1"])
    """
    if errors:
        count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
        more = [f"and {len(errors) - _MOST_SHOWN} more"] if len(errors) > _MOST_SHOWN else []
        raise UserError(f"{count} in {subject}:", [*errors[:_MOST_SHOWN], *more])


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """' (did you mean 'data'?)' if an option is close to `word`, else a list of the options."""
    names = list(options)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f" (did you mean '{matches[0]}'?)" if matches else f"; known: {', '.join(names)}"
