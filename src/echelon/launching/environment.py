"""The environment variables that a user gives to single ranks."""

from collections.abc import Callable, Mapping

from echelon.errors import UserError, raise_errors

Environment = Callable[[int], Mapping[str, str]]

_RESERVED = ("RANK", "WORLD_SIZE")


def variables_of(environment: Environment | None, rank: int) -> dict[str, str]:
    """What `environment(rank)` says, checked."""
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
