"""Errors of single values of a config: counts, numbers, yes or no. They need no torch."""

import math
from collections.abc import Callable
from typing import Any


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_integer(value) or isinstance(value, float)


# Kind of value → what it must be, and the check.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "count": ("an integer, at least 1", lambda value: _is_integer(value) and value >= 1),
    "count or 0": ("an integer, at least 0", lambda value: _is_integer(value) and value >= 0),
    "number": ("a number above 0", lambda value: _is_number(value) and 0 < value < math.inf),
    "weight": ("a number, at least 0", lambda value: _is_number(value) and 0 <= value < math.inf),
    "fraction": ("a number from 0 to below 1", lambda value: _is_number(value) and 0 <= value < 1),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
}


def value_errors(config: object, kind: str, *names: str) -> list[str]:
    """List the fields of a config that are not of this kind."""
    rule, is_valid = _RULES[kind]
    values = {name: getattr(config, name) for name in names}
    return [f"{name}={value!r}: must be {rule}" for name, value in values.items() if not is_valid(value)]
