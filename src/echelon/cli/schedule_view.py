"""How echelon schedule shows a program: as JSON, on the screen, in a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from echelon.errors import UserError
from echelon.program import Program, Span, Timeline, grid, show
from echelon.program.picture import Panel, draw_together

_STYLES = {
    "F": "blue",
    "B": "dark_orange",
    "I": "yellow",
    "W": "green",
    "UPDATE": "bold",
    "REDUCE": "magenta",
}
_MOST_RANKS, _MOST_LINES, _MOST_SPANS = 32, 72, 50_000  # of a grid on the screen


@dataclass(frozen=True)
class Shown:
    """A program, and the words in which it was asked for."""

    program: Program
    name: str
    stages: int
    microbatches: int
    chunks: int
    batches: int = 1
    file: str | None = None

    @property
    def bubble_of(self) -> str:
        if self.batches == 1:
            return "one step, from empty to empty"
        return f"{self.batches} batches, with one fill and one drain"


def summary(shown: Shown, line: Timeline) -> dict[str, Any]:
    """What --json prints."""
    program = shown.program
    return {
        "schedule": shown.name,
        "stages": shown.stages,
        "microbatches": shown.microbatches,
        "chunks": shown.chunks,
        "batches": shown.batches,
        "ranks": len(program.ranks),
        "placement": [list(ranks) for ranks in program.placement],
        "bubble_fraction": float(line.bubble_fraction),
        "bubble_of": shown.bubble_of,
        "in_flight": list(line.in_flight),
        "versions": list(line.versions),
        "seconds": float(line.makespan),
        "busy_seconds": [float(busy) for busy in line.busy],
        "instructions": sum(map(len, program.ranks)),
    }


def headline(shown: Shown) -> str:
    chunks = f", {shown.chunks} chunks a rank" if shown.chunks > 1 else ""
    batches = f", {shown.batches} batches of" if shown.batches > 1 else ","
    return f"{shown.name}: {shown.stages} stages{chunks}{batches} {shown.microbatches} microbatches"


def display(screen: Console, shown: Shown, line: Timeline) -> None:
    """What a person sees: figures, a table of the ranks, the grid in colour."""
    bubble = line.bubble_fraction
    exact = f"{bubble} = " if isinstance(bubble, Fraction) and bubble.denominator < 1000 else ""
    screen.print(f"[bold]{escape(headline(shown))}[/]: checked, nothing is wrong", soft_wrap=True)
    told = f"bubble {exact}{float(bubble):.1%} of {shown.bubble_of}; {float(line.makespan):g} seconds"
    screen.print(told, soft_wrap=True)
    if len(line.program.ranks) > _MOST_RANKS:
        screen.print(f"in flight at most {max(line.in_flight)}, versions at most {max(line.versions)}")
        return
    screen.print(_table(shown, line))
    display_spans(screen, list(line.spans()), len(line.program.ranks))


def display_spans(
    screen: Console, spans: Sequence[Span], ranks: int, tick: int | float | None = None
) -> None:
    """The first parts of the grid, about a screen or two; a column is `tick` long."""
    if len(spans) > _MOST_SPANS:
        return
    drawn = grid.draw(spans, ranks, tick=tick)
    blocks = list(drawn.blocks(screen.width))
    count = max(1, _MOST_LINES // (len(drawn.lines) + 1))
    for block in blocks[:count]:
        screen.print()
        for front, row in block:
            screen.print(_coloured(front, row), no_wrap=True, crop=False, soft_wrap=True)
    if len(blocks) > count:
        screen.print(
            f"\n{len(blocks) - count} more parts like these are left out: --out FILE.svg draws them all"
        )


def _table(shown: Shown, line: Timeline) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("rank", "stages", "in flight", "versions", "busy"):
        table.add_column(head, justify="right")
    for rank, busy in enumerate(line.busy):
        held = ", ".join(map(str, shown.program.stages_of(rank)))
        share = f"{float(busy / line.makespan):.0%}" if line.makespan else "–"
        table.add_row(str(rank), held, str(line.in_flight[rank]), str(line.versions[rank]), share)
    return table


def _coloured(front: str, row: Sequence[grid.Tick]) -> Text:
    text = Text(front, style="dim")
    for tick in row:
        text.append(tick.text, style="dim" if tick.op is None else _STYLES.get(tick.op.value, ""))
    text.rstrip()
    return text


# --- files --------------------------------------------------------------------------------------------


def panel(shown: Shown, line: Timeline) -> Panel:
    """The plan as it is drawn."""
    about = f"bubble {float(line.bubble_fraction):.1%} of {shown.bubble_of}; {_kept(line)}"
    return Panel(list(line.spans()), headline(shown), about)


def write(out: Path, shown: Shown, panels: Sequence[Panel]) -> None:
    """A picture, or the text of the program, by the end of the name."""
    if out.suffix == ".txt":
        content = show(shown.program).encode()
    else:
        drawn = draw_together(panels, len(shown.program.ranks), "seconds")
        content = drawn.svg().encode() if out.suffix == ".svg" else drawn.png()
    try:
        out.write_bytes(content)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from None


def _kept(line: Timeline) -> str:
    kept = f"in flight {_listed(line.in_flight)}"
    return kept if max(line.versions) == 1 else f"{kept}; versions {_listed(line.versions)}"


def _listed(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, counts)) if len(counts) <= 16 else f"at most {max(counts)}"
