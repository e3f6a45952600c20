import pytest

from echelon.doctor.quantities import heading, show_bytes, show_figure, show_rate, show_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [(8, "8 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (25 * 2**20, "25.0 MiB"), (3 * 2**30, "3.0 GiB")],
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
        ("busiest_rank_sent_bytes", 2048, "busiest rank sent", "2.0 KiB"),
        ("transfer_seconds", 0.002, "transfer", "2.0 ms"),
        ("bubble_difference_points", -1.24, "bubble difference", "-1.2 points"),
        ("collectives_a_layer_count", 4.5, "collectives a layer", "4.5"),
        ("bubble_measured", 1 / 9, "bubble measured", "11.1%"),
    ],
)
def test_figures_are_shown_by_the_unit_in_their_name(name: str, number: float, head: str, text: str) -> None:
    assert (heading(name), show_figure(name, number)) == (head, text)
