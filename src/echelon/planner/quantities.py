"""Sizes, rates and clusters as people write them: '16GB', '10Gb/s', '4x4'. A error is a ValueError."""

import re

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"


def read_size(text: str) -> float:
    """Bytes: read_size('16GB') == 16e9, read_size('16GiB') == 16 * 2**30."""
    found = re.fullmatch(rf"{_NUMBER}\s*([kmgtKMGT]?i?)B?", text.strip())
    return _value(found, text, "bytes, more than 0, like 16e9, 16GB or 16GiB")


def read_rate(text: str) -> float:
    """Bytes per second: read_rate('10GB/s') == 1e10, read_rate('10Gb/s') == 1.25e9."""
    found = re.fullmatch(rf"{_NUMBER}\s*([kmgtKMGT]?i?)([bB]/s)?", text.strip())
    rate = _value(found, text, "bytes per second, more than 0, like 1.25e9, 1.25GB/s or 10Gb/s (bits)")
    return rate / 8 if found and found[3] == "b/s" else rate


def read_rates(text: str) -> tuple[float, ...]:
    """One per level, innermost first: '1e10,1.25e9'."""
    return tuple(read_rate(part) for part in text.split(","))


def read_workers(text: str) -> tuple[int, ...]:
    """One per level, innermost first: read_workers('4x2') == (4, 2)."""
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"'{text}' must be integers, at least 1, innermost first, like 8 or 4x2")
    return tuple(map(int, parts))


def _value(found: re.Match[str] | None, text: str, rule: str) -> float:
    factors = _PREFIXES | _BINARY
    if not found or found[2].lower() not in factors:
        raise ValueError(f"'{text}' must be {rule}")
    value = float(found[1]) * factors[found[2].lower()]
    if not 0 < value < float("inf"):
        raise ValueError(f"'{text}' must be {rule}")
    return value
