"""Curves with few points: of each part the lowest and the highest stay, so that no spike is lost."""

import math
from itertools import pairwise

import numpy as np

from echelon.report.run_files import Column

MOST_POINTS = 2000
_DIGITS = 7


def thin(x: Column, y: Column, most: int = MOST_POINTS) -> dict[str, list[float | None]]:
    """The curve as {"x": …, "y": …}; where y is not finite, it has a gap."""
    if len(x) > most:
        kept = _extremes(y, most // 2)
        x, y = x[kept], y[kept]
    return {"x": [_short(value) for value in x], "y": [_short(value) for value in y]}


def _extremes(y: Column, buckets: int) -> np.ndarray:
    """The places of the lowest and the highest of each bucket, in order; the first and the last too."""
    edges = np.linspace(0, len(y), buckets + 1).astype(int)
    low, high = np.where(np.isfinite(y), y, np.inf), np.where(np.isfinite(y), y, -np.inf)
    places = {0, len(y) - 1}
    for begin, end in pairwise(edges.tolist()):
        places.update((begin + int(low[begin:end].argmin()), begin + int(high[begin:end].argmax())))
    return np.array(sorted(places))


def _short(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short
