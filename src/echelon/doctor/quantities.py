"""Bytes, seconds and rates as a person reads them."""

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
