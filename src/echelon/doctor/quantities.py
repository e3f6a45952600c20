"""Bytes, seconds, rates and shares as a person reads them."""

from collections.abc import Callable

KIB, MIB, GIB = 2**10, 2**20, 2**30


def show_bytes(count: float) -> str:
    """show_bytes(25 * 2**20) == '25.0 MiB'"""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def show_seconds(seconds: float) -> str:
    """show_seconds(0.0042) == '4.2 ms'"""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def show_rate(bytes_per_second: float) -> str:
    """show_rate(2.5e9) == '2.50 GB/s'; rates count in powers of ten, as networks do."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.2f} MB/s"


_UNITS: dict[str, Callable[[float], str]] = {
    "_bytes_per_second": show_rate,
    "_bytes": show_bytes,
    "_seconds": show_seconds,
    "_count": lambda count: f"{count:g}",
    "_points": lambda points: f"{points:+.1f} points",
}


def show_figure(name: str, number: float) -> str:
    """By the unit at the end of its name: peak_bytes, transfer_seconds … Without one it is a share of 1.

    show_figure("bubble_measured", 0.1111) == '11.1%'
    """
    for unit, show in _UNITS.items():
        if name.endswith(unit):
            return show(number)
    return f"{number:.1%}"


def heading(name: str) -> str:
    """What stands over figures of a name: 'bus' of 'bus_bytes_per_second'."""
    for unit in _UNITS:
        if name.endswith(unit):
            return name.removesuffix(unit).replace("_", " ")
    return name.replace("_", " ")
