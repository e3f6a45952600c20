"""Clusters as people write them, and the levels that they make."""

from collections.abc import Callable
from typing import Any

import pytest

from echelon.planner.cluster import Level, cluster_errors, make_levels, read_bandwidths, read_workers


@pytest.mark.parametrize(
    ("reader", "text", "value"),
    [
        (read_bandwidths, "1e10,1.25e9", (1e10, 1.25e9)),
        (read_bandwidths, "10GB/s, 10Gb/s", (1e10, 1.25e9)),
        (read_workers, "8", (8,)),
        (read_workers, "4x2", (4, 2)),
    ],
)
def test_what_is_read(reader: Callable[[str], Any], text: str, value: Any) -> None:
    assert reader(text) == value


@pytest.mark.parametrize("text", ["", "1e9,", "0", "1Gb", "x"])
def test_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="must be bytes per second"):
        read_bandwidths(text)


@pytest.mark.parametrize("text", ["", "0", "4x", "-4", "4.0", "four", "２", "1000000", "9" * 5000])
def test_no_workers(text: str) -> None:
    with pytest.raises(ValueError, match="integers"):
        read_workers(text)


def test_levels_know_the_ranks_inside_a_worker_and_in_the_cluster() -> None:
    assert make_levels((4, 2), (1e10, 1e9)) == (Level(4, 1e10, 1, 8), Level(2, 1e9, 4, 8))


def test_every_error_is_listed_at_once() -> None:
    errors = cluster_errors((0, 2), (-1.0,), memory=0)
    assert [error.split(":")[0] for error in errors] == [
        "workers 0",
        "bandwidth -1.0",
        "2 levels of workers and 1 bandwidths",
        "memory 0",
    ]
    assert cluster_errors((4, 2), (1e10, 1e9), memory=16e9) == []
    assert cluster_errors((4,), (float("inf"),), memory=None) != []
