"""The cluster that a model is split over: levels of workers, innermost first.

It is given as numbers of workers and bandwidths, one of each per level. (4, 2) and (1e10, 1.25e9) are two
machines of 4 workers, with 10 GB/s inside a machine and 1.25 GB/s between machines.
"""

import math
from typing import NamedTuple

from echelon.quantities import read_rate


class Level(NamedTuple):
    """One level: workers that communicate at `bandwidth` bytes per second, each made of `inside` ranks."""

    workers: int
    bandwidth: float
    inside: int
    ranks: int  # of the whole cluster


def make_levels(workers: tuple[int, ...], bandwidths: tuple[float, ...]) -> tuple[Level, ...]:
    """Levels from numbers of workers and bandwidths, innermost first."""
    levels: list[Level] = []
    inside, ranks = 1, math.prod(workers)
    for count, bandwidth in zip(workers, bandwidths, strict=True):
        levels.append(Level(count, bandwidth, inside, ranks))
        inside *= count
    return tuple(levels)


def read_workers(text: str) -> tuple[int, ...]:
    """One number per level: read_workers('4x2') == (4, 2). Other text is a ValueError."""
    parts = text.lower().split("x")
    if not all(part.isascii() and part.isdecimal() and len(part) <= 6 and int(part) >= 1 for part in parts):
        raise ValueError(f"'{text}' must be integers from 1 to 999999, innermost first, like 8 or 4x2")
    return tuple(map(int, parts))


def read_bandwidths(text: str) -> tuple[float, ...]:
    """One rate per level: read_bandwidths('10GB/s,1.25e9') == (1e10, 1.25e9). Other text is a ValueError."""
    return tuple(read_rate(part) for part in text.split(","))


def cluster_errors(
    workers: tuple[int, ...], bandwidths: tuple[float, ...], memory: float | None
) -> list[str]:
    """Every error of the numbers that describe a cluster."""
    errors = [
        f"workers {count}: must be an integer, at least 1"
        for count in workers
        if not isinstance(count, int) or count < 1
    ]
    errors += [
        f"bandwidth {rate}: must be bytes per second, more than 0"
        for rate in bandwidths
        if not 0 < rate < math.inf
    ]
    if len(workers) != len(bandwidths) or not workers:
        errors.append(
            f"{len(workers)} levels of workers and {len(bandwidths)} bandwidths: give one bandwidth per "
            "level, innermost first"
        )
    if memory is not None and not memory > 0:
        errors.append(f"memory {memory}: must be bytes, more than 0")
    return errors
