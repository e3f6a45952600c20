import pytest

from echelon.doctor.quantities import show_bytes, show_rate, show_seconds


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
