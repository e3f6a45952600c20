"""Bytes, seconds, rates and shares as text; sizes and rates from text, with a ValueError for other text."""

import re
from collections.abc import Callable, Collection

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_PREFIXES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": KIB,
    "mi": MIB,
    "gi": GIB,
    "ti": TIB,
}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([kmgtKMGT]?i?)"


def show_bytes(count: float) -> str:
    """show_bytes(25 * 2**20) == '25.0 MiB'"""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def show_seconds(seconds: float) -> str:
    """show_seconds(0.0042) == '4.2 ms'"""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def counted(number: int, noun: str) -> str:
    """counted(1, 'error') == '1 error', counted(2, 'error') == '2 errors'"""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def show_runs(numbers: Collection[int]) -> list[str]:
    """show_runs((0, 1, 2, 5)) == ['0-2', '5']"""
    firsts = sorted(number for number in numbers if number - 1 not in numbers)
    lasts = sorted(number for number in numbers if number + 1 not in numbers)
    pairs = zip(firsts, lasts, strict=True)
    return [str(first) if first == last else f"{first}-{last}" for first, last in pairs]


def show_rate(bytes_per_second: float) -> str:
    """show_rate(2.5e9) == '2.50 GB/s'; rates count in powers of ten, as networks do."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.2f} MB/s"


_UNITS: dict[str, Callable[[float], str]] = {
    "_bytes_per_second": show_rate,
    "_flops_per_second": lambda rate: f"{rate / 1e12:,.0f} TFLOP/s",
    "_per_second": lambda rate: f"{rate:,.0f}/s",
    "_bytes": show_bytes,
    "_seconds": show_seconds,
    "_count": lambda count: f"{count:g}",
    "_loss": lambda loss: f"{loss:.3f}",
    "_smaller": lambda times: f"{times:.2f} ×",
    "_points": lambda points: f"{points:+.1f} points",
}


def show_figure(name: str, number: float) -> str:
    """By the unit at the end of the name: peak_bytes, transfer_seconds … A name without one is a share of 1.

    show_figure("bubble_measured", 0.1111) == '11.1%'
    """
    for unit, show in _UNITS.items():
        if name.endswith(unit):
            return show(number)
    return f"{number:.1%}"


def heading(name: str) -> str:
    """The title of a column of figures: heading('bus_bytes_per_second') == 'bus'."""
    for unit in _UNITS:
        if name.endswith(unit) and unit != "_loss":
            return name.removesuffix(unit).replace("_", " ")
    return name.replace("_", " ")


def read_bytes(text: str) -> float:
    """read_bytes('16GB') == 16e9, read_bytes('16GiB') == 16 * 2**30"""
    match = re.fullmatch(rf"{_NUMBER}B?", text.strip())
    return _value(match, text, "bytes, more than 0, like 16e9, 16GB or 16GiB")


def read_rate(text: str) -> float:
    """Bytes per second: read_rate('10GB/s') == 1e10, read_rate('10Gb/s') == 1.25e9."""
    match = re.fullmatch(rf"{_NUMBER}([bB]/s)?", text.strip())
    rate = _value(match, text, "bytes per second, more than 0, like 1.25e9, 1.25GB/s or 10Gb/s (bits)")
    return rate / 8 if match and match[3] == "b/s" else rate


def _value(match: re.Match[str] | None, text: str, rule: str) -> float:
    if any(each.isdecimal() and not each.isascii() for each in text):
        raise ValueError(f"'{text}' must be written with the digits 0 to 9")
    if not match or match[2].lower() not in _PREFIXES:
        raise ValueError(f"'{text}' must be {rule}")
    value = float(match[1]) * _PREFIXES[match[2].lower()]
    if not 0 < value < float("inf"):
        raise ValueError(f"'{text}' must be {rule}")
    return value
