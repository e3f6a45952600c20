"""The environment variables that a user gives to single ranks."""

from collections.abc import Callable, Mapping

from echelon.errors import raise_errors

Environment = Callable[[int], Mapping[str, str]]

_RESERVED = ("RANK", "WORLD_SIZE")


def variables_of(environment: Environment | None, rank: int) -> dict[str, str]:
    """What `environment(rank)` says, checked."""
    variables = dict(environment(rank)) if environment is not None else {}
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
