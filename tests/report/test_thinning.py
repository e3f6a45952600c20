"""Curves with few points keep their spikes and their gaps."""

import math

import numpy as np

from echelon.report.thinning import MOST_POINTS, thin


def test_a_short_curve_stays_as_it_is() -> None:
    assert thin(np.array([1.0, 2.0, 3.0]), np.array([0.5, math.nan, math.inf])) == {
        "x": [1, 2, 3],
        "y": [0.5, None, None],
    }


def test_a_long_curve_keeps_its_ends_and_every_spike() -> None:
    x = np.arange(1.0, 100_001.0)
    y = np.sin(x / 500)
    for place in (77, 50_000, 99_998):
        y[place] = 10.0 + place
        y[place + 1] = -10.0 - place
    y[30_000:40_000] = math.nan
    found = thin(x, y)
    assert len(found["x"]) <= MOST_POINTS + 2
    assert (found["x"][0], found["x"][-1]) == (1, 100_000)
    assert {10.0 + place for place in (77, 50_000, 99_998)} <= set(found["y"])
    assert {-10.0 - place for place in (77, 50_000, 99_998)} <= set(found["y"])
    assert None in found["y"]
    assert found["x"] == sorted(found["x"])
