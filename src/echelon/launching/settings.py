"""Settings that users give to a launch: its deadline, and environment variables of single ranks."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Final, Literal

from echelon.errors import UserError, raise_errors

VARIABLE = "ECHELON_DEADLINE"
SECONDS = 1800.0

# A number of seconds, None for no limit, or what the environment says.
Deadline = float | Literal["environment"] | None
FROM_ENVIRONMENT: Final = "environment"


def deadline_seconds(deadline: Deadline) -> float | None:
    """Return the seconds, or None for no limit; refuse anything else with a UserError."""
    given, unlimited, seconds = f"deadline={deadline!r}", "None", deadline
    if deadline == FROM_ENVIRONMENT:
        text = os.environ.get(VARIABLE, "")
        given, unlimited = f"{VARIABLE}={text!r} in the environment", "none"
        try:
            seconds = None if text.lower() == "none" else float(text or SECONDS)
        except ValueError:
            seconds = math.nan
    assert not isinstance(seconds, str)
    if seconds is not None and not seconds > 0:  # NaN is no deadline either
        raise UserError(f"{given}: must be more than 0 seconds, or {unlimited} for no deadline")
    return seconds


def operation_seconds(deadline: float | None) -> float | None:
    """torch's own timeout of one operation: much longer than the deadline, whose report says more."""
    return None if deadline is None else 2 * deadline + 60


Environment = Callable[[int], Mapping[str, str]]

_RESERVED = ("RANK", "WORLD_SIZE")


def variables_of(environment: Environment | None, rank: int) -> dict[str, str]:
    """Return the checked variables of `environment(rank)`."""
    if environment is None:
        return {}
    if not callable(environment):
        raise UserError(
            f"environment={environment!r}: must be a function of the rank that returns a dict; "
            "environment=lambda rank: {…}"
        )
    returned = environment(rank)
    if not isinstance(returned, Mapping):
        raise UserError(f"environment({rank}) returned {returned!r}: must return a dict of variables")
    variables = dict(returned)
    errors = [
        f"{name}={value!r}: names and values must be strings"
        for name, value in variables.items()
        if not (isinstance(name, str) and isinstance(value, str))
    ]
    errors += [
        f"{name}={variables[name]!r}: the launcher sets this variable; remove it"
        for name in _RESERVED
        if name in variables
    ]
    raise_errors(f"environment({rank})", errors)
    return variables
