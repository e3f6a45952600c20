"""The keys of a job file, what kind of value each takes, and values that only look like one.

pydantic reads `true` as 1, "yes" as true and full-width digits as numbers. A user who writes them has made a
mistake, or will not know what was read.
"""

import dataclasses
from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

from echelon.train.jobs.job import Job

_RULES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    tuple: "two numbers",
}
_OWN_RULES = {"keep": "an integer, or memory", "loss_scale": "a number above 0, or dynamic"}


def keys_at(path: list[str]) -> list[str]:
    """The keys that a job knows under `path`."""
    kind: Any = Job()
    for name in path:
        kind = getattr(kind, name)
    return [entry.name for entry in dataclasses.fields(kind)]


def rule_of(path: list[str]) -> str:
    """What the value at `path` must be: rule_of(["model", "layers"]) == "an integer"."""
    return _OWN_RULES.get(".".join(path)) or _RULES.get(_kind(path), "a table")


def is_value(path: list[str]) -> bool:
    """Whether there is a key at `path` that is no table."""
    return _kind(path) is not None


def remove_lookalikes(values: dict[str, Any]) -> dict[str, str]:
    """Remove values that pydantic would read as another kind; returns by key the error of each."""
    errors: dict[str, str] = {}
    for path, table in _tables([], values):
        for name in [name for name in keys_at(path) if name in table]:
            place = [*path, name]
            error = _error(place, table[name])
            if error is not None:
                key = ".".join(place)
                errors[key] = f"{key}={_show(table.pop(name))}: must be {error}"
    return errors


def _tables(path: list[str], table: dict[str, Any]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """A table, and those in it that a job knows, with their places."""
    yield path, table
    for name in keys_at(path):
        inner = table.get(name)
        if not is_value([*path, name]) and isinstance(inner, dict):
            yield from _tables([*path, name], inner)


def _kind(path: list[str]) -> Any:
    """bool, int, float, str or tuple; None for a table, or where there is no such key."""
    kind: Any = Job
    for name in path:
        fields = {entry.name: entry.type for entry in dataclasses.fields(kind)}
        kind = fields.get(name)
        if isinstance(kind, UnionType) or get_origin(kind) is Union:  # int | None
            kind = next(each for each in get_args(kind) if each is not type(None))
        if not dataclasses.is_dataclass(kind):
            return get_origin(kind) or kind
    return None


def _error(path: list[str], value: Any) -> str | None:
    """What the value at `path` must be, if this one only looks like it."""
    kind, rule = _kind(path), rule_of(path)
    if kind is bool and not isinstance(value, bool):
        return None if str(value).lower() in ("true", "false") else rule
    if kind not in (int, float, tuple):
        return None
    items = value if kind is tuple and isinstance(value, list) else [value]
    if any(isinstance(item, bool) for item in items):
        return rule
    if any(isinstance(item, str) and not item.isascii() for item in items):
        return f"{rule}, written with the digits 0 to 9"
    return None


def _show(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
