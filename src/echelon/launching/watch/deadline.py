"""How long ranks may be silent before a job is taken for one that hangs: an argument, or ECHELON_DEADLINE."""

import os
from typing import Final, Literal

from echelon.errors import UserError

VARIABLE = "ECHELON_DEADLINE"
SECONDS = 1800.0

# A number of seconds, None for no limit, or what the environment says.
Deadline = float | Literal["environment"] | None
FROM_ENVIRONMENT: Final = "environment"


def deadline_seconds(deadline: Deadline) -> float | None:
    """The seconds; None: no limit. A UserError if an argument or the environment has something else."""
    if deadline == FROM_ENVIRONMENT:
        text = os.environ.get(VARIABLE, "")
        return _check(_read(text), f"{VARIABLE}={text!r} in the environment", "none") if text else SECONDS
    assert not isinstance(deadline, str)
    return _check(deadline, f"deadline={deadline!r}", "None")


def operation_seconds(deadline: float | None) -> float | None:
    """torch's own timeout of one operation: much longer than the deadline, whose report says more."""
    return None if deadline is None else 2 * deadline + 60


def _read(text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        return float("nan")  # is refused with its text


def _check(seconds: float | None, given: str, unlimited: str) -> float | None:
    if seconds is not None and not seconds > 0:  # NaN is no deadline either
        raise UserError(f"{given}: must be more than 0 seconds, or {unlimited} for no deadline")
    return seconds
