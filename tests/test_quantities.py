"""Quantities as text, and text as quantities."""

import pytest

from echelon.quantities import (
    counted,
    heading,
    read_bytes,
    read_rate,
    show_bytes,
    show_figure,
    show_rate,
    show_runs,
    show_seconds,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (8, "8 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (25 * 2**20, "25.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**40, "1.0 TiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert show_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(1.5, "1.50 s"), (0.0042, "4.2 ms"), (2e-5, "20 µs")])
def test_seconds(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


@pytest.mark.parametrize(("rate", "text"), [(2.5e9, "2.50 GB/s"), (4e6, "4.00 MB/s")])
def test_rates(rate: float, text: str) -> None:
    assert show_rate(rate) == text


@pytest.mark.parametrize(
    ("name", "number", "head", "text"),
    [
        ("bus_bytes_per_second", 4e6, "bus", "4.00 MB/s"),
        ("tokens_per_second", 241134.07, "tokens", "241,134/s"),
        ("busiest_rank_sent_bytes", 2048, "busiest rank sent", "2.0 KiB"),
        ("transfer_seconds", 0.002, "transfer", "2.0 ms"),
        ("bubble_difference_points", -1.24, "bubble difference", "-1.2 points"),
        ("collectives_per_layer_count", 4.5, "collectives per layer", "4.5"),
        ("bubble_measured", 1 / 9, "bubble measured", "11.1%"),
    ],
)
def test_figures_are_shown_by_the_unit_in_their_name(name: str, number: float, head: str, text: str) -> None:
    assert (heading(name), show_figure(name, number)) == (head, text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16e9", 16e9),
        ("16GB", 16e9),
        ("1.5 GiB", 1.5 * 2**30),
        ("2m", 2e6),
        ("500K", 5e5),
        ("3TiB", 3 * 2**40),
    ],
)
def test_sizes_are_read(text: str, size: float) -> None:
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1e999", "16 elephants", "1iB", "nan"])
def test_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be bytes"):
        read_bytes(text)


@pytest.mark.parametrize("text", ["１２GB", "1.٣"])
def test_digits_of_other_scripts_are_refused(text: str) -> None:
    for read in (read_bytes, read_rate):
        with pytest.raises(ValueError, match=f"'{text}' must be written with the digits 0 to 9"):
            read(text)


@pytest.mark.parametrize(("text", "rate"), [("10GB/s", 1e10), ("10Gb/s", 1.25e9), ("1e10", 1e10)])
def test_rates_are_read_in_bytes_or_in_bits(text: str, rate: float) -> None:
    assert read_rate(text) == rate


@pytest.mark.parametrize("text", ["", "0", "1Gb", "x", "nan"])
def test_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="must be bytes per second"):
        read_rate(text)


def test_numbers_as_runs() -> None:
    assert show_runs((0, 1, 2, 5, 8, 7)) == ["0-2", "5", "7-8"]
    assert show_runs(()) == []


def test_nouns_are_counted() -> None:
    assert [counted(number, "error") for number in (0, 1, 2)] == ["0 errors", "1 error", "2 errors"]
