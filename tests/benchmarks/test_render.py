import io

from rich.console import Console

from benchmarks import Result, Row, Spread, render

ONE = Spread(1.0, 1.0, 1.0)
ROWS = (
    Row("2 ranks", "backend", "backend", Spread(0.001, 0.002, 0.003), ONE, {"bus_bytes_per_second": 3e9}),
    Row("2 ranks", "ring", "backend", ONE, Spread(1.25, 1.5, 2.0), {"sent_bytes": 2048}),
)


def text_of(commit: str | None, **settings: list[str]) -> str:
    hardware = {"cpu": "Some CPU", "cores": 2, "gpus": ["Some GPU"]}
    result = Result(
        "collectives",
        "python -m benchmarks",
        commit,
        "2030-01-01",
        {"torch": "2.13.0"},
        hardware,
        settings,
        ROWS,
    )
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(render(result))
    return console.export_text()


def test_a_row_shows_time_ratio_and_extras_by_their_unit() -> None:
    backend, ring = (line.split("│")[1:-1] for line in text_of("abc").splitlines() if "│" in line)

    assert [cell.strip() for cell in backend] == ["2 ranks", "backend", "2.0 ms", "baseline", "3.00 GB/s", ""]
    assert [cell.strip() for cell in ring] == ["", "ring", "1.00 s", "1.50 (1.25 … 2.00)", "", "2.0 KiB"]


def test_the_last_lines_say_where_the_figures_come_from() -> None:
    assert "2 cores of Some CPU, Some GPU · torch 2.13.0 · 2030-01-01 · commit abc" in text_of("abc")
    assert "commit unknown" in text_of(None)


def test_a_peer_that_is_missing_is_named() -> None:
    assert "commit abc\ndeepspeed is not installed" in text_of("abc", not_installed=["deepspeed"])
