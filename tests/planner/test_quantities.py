"""Sizes, rates and clusters as people write them."""

from collections.abc import Callable
from typing import Any

import pytest

from echelon.planner.quantities import read_rates, read_size, read_workers


@pytest.mark.parametrize(
    ("reader", "text", "value"),
    [
        (read_size, "16e9", 16e9),
        (read_size, "16GB", 16e9),
        (read_size, "1.5 GiB", 1.5 * 2**30),
        (read_size, "2m", 2e6),
        (read_rates, "1e10,1.25e9", (1e10, 1.25e9)),
        (read_rates, "10GB/s, 10Gb/s", (1e10, 1.25e9)),
        (read_workers, "8", (8,)),
        (read_workers, "4x2", (4, 2)),
    ],
)
def test_what_is_read(reader: Callable[[str], Any], text: str, value: Any) -> None:
    assert reader(text) == value


@pytest.mark.parametrize("text", ["", "0", "-1", "1e999", "16 elephants", "1iB", "nan"])
def test_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be bytes"):
        read_size(text)


@pytest.mark.parametrize("text", ["", "1e9,", "0", "1Gb", "x"])
def test_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="must be bytes per second"):
        read_rates(text)


@pytest.mark.parametrize("text", ["", "0", "4x", "-4", "4.0", "four"])
def test_no_workers(text: str) -> None:
    with pytest.raises(ValueError, match="integers"):
        read_workers(text)
