"""Cells of a row: numbers out of what people wrote, like '8 local', '>1' or '2048x256 experts top8'."""

import re
from collections.abc import Mapping

from echelon.errors import UserError

Row = Mapping[str, str]


def text(row: Row, name: str) -> str:
    return row.get(name) or ""


def integer(row: Row, name: str, default: int | None = None) -> int:
    """The number that a cell starts with. Without one: the default, or a UserError."""
    match = re.match(r"\s*>?(\d+)", text(row, name))
    if match:
        return int(match[1])
    if default is None:
        raise UserError(f"{name}={text(row, name)!r}: the row does not state it")
    return default


def measured(row: Row, name: str) -> float | None:
    """A measured number; None if the cell has none."""
    try:
        value = float(text(row, name))
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
