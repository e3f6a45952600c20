"""A bench's result for a terminal. Only this module imports rich, and only when something is rendered."""

from typing import TYPE_CHECKING

from benchmarks.compare import Row, Spread
from benchmarks.result import Result
from echelon.quantities import heading, show_figure, show_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


def render(result: Result) -> "RenderableType":
    """One row per contender, with a line between cases; below the table, where the figures come from."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    extras = list(dict.fromkeys(name for row in result.rows for name in row.extras))
    table = Table(title=f"python -m benchmarks {result.name}", title_justify="left")
    table.add_column("case")
    table.add_column("contender")
    for head in ("time", "ratio to baseline", *map(heading, extras)):
        table.add_column(head, justify="right")
    case = ""
    for row in result.rows:
        if case not in ("", row.case):
            table.add_section()
        table.add_row("" if row.case == case else row.case, row.contender, *_cells(row, extras))
        case = row.case
    return Group(table, Text(_origin(result), "dim"))


def _cells(row: Row, extras: list[str]) -> list[str]:
    ratio = "baseline" if row.contender == row.baseline else _show_ratio(row.ratio)
    return [
        show_seconds(row.seconds.median),
        ratio,
        *(show_figure(name, row.extras[name]) if name in row.extras else "" for name in extras),
    ]


def _show_ratio(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} … {ratio.high:.2f})"


def _origin(result: Result) -> str:
    machine = f"{result.hardware['cores']} cores of {result.hardware['cpu']}"
    gpus = "".join(f", {name}" for name in result.hardware["gpus"])
    missing = [f"{name} is not installed" for name in result.settings.get("not_installed", ())]
    lines = "".join(f"\n{line}" for line in [*missing, *result.settings.get("remarks", ())])
    return (
        f"medians; ratios paired by round, with quartiles · {machine}{gpus} · "
        f"torch {result.versions['torch']} · {result.date} · commit {result.commit or 'unknown'}{lines}"
    )
