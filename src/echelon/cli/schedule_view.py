"""How `echelon schedule` shows a program: as JSON, on the screen, in a file."""

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
from echelon.program import Op, Program, Span, Timeline, grid, show
from echelon.program.picture import Panel, draw_together

_STYLES = {
    Op.FORWARD: "blue",
    Op.BACKWARD: "dark_orange",
    Op.BACKWARD_INPUT: "yellow",
    Op.BACKWARD_WEIGHT: "green",
    Op.REDUCE: "magenta",
    Op.STORE: "cyan",
    Op.FETCH: "cyan",
    Op.UPDATE: "bold",
}
_MOST_RANKS, _MOST_LINES, _MOST_SPANS = 32, 72, 50_000  # of a grid on the screen


@dataclass(frozen=True)
class ScheduleRequest:
    """A program, and the name and numbers that the user asked for."""

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


def summary(request: ScheduleRequest, line: Timeline) -> dict[str, Any]:
    """What --json prints."""
    program = request.program
    return {
        "schedule": request.name,
        "stages": request.stages,
        "microbatches": request.microbatches,
        "chunks": request.chunks,
        "batches": request.batches,
        "ranks": len(program.ranks),
        "placement": [list(ranks) for ranks in program.placement],
        "bubble_fraction": float(line.bubble_fraction),
        "bubble_of": request.bubble_of,
        "in_flight": list(line.in_flight),
        "versions": list(line.versions),
        "seconds": float(line.makespan),
        "busy_seconds": [float(busy) for busy in line.busy],
        "instructions": sum(map(len, program.ranks)),
    }


def headline(request: ScheduleRequest) -> str:
    chunks = f", {request.chunks} chunks per rank" if request.chunks > 1 else ""
    batches = f", {request.batches} batches of" if request.batches > 1 else ","
    return f"{request.name}: {request.stages} stages{chunks}{batches} {request.microbatches} microbatches"


def display(screen: Console, request: ScheduleRequest, line: Timeline) -> None:
    """Print the figures, a table of the ranks, and the grid in colour."""
    bubble = line.bubble_fraction
    exact = f"{bubble} = " if isinstance(bubble, Fraction) and bubble.denominator < 1000 else ""
    screen.print(f"[bold]{escape(headline(request))}[/]: checked, no errors", soft_wrap=True)
    figures = f"bubble {exact}{float(bubble):.1%} of {request.bubble_of}; {float(line.makespan):g} seconds"
    screen.print(figures, soft_wrap=True)
    if len(line.program.ranks) > _MOST_RANKS:
        screen.print(f"in flight at most {max(line.in_flight)}, versions at most {max(line.versions)}")
        return
    screen.print(_table(request, line))
    display_spans(screen, list(line.spans()), len(line.program.ranks))


def display_spans(
    screen: Console, spans: Sequence[Span], ranks: int, tick: int | float | None = None
) -> None:
    """Print the first parts of the grid, about two screens; a column is `tick` long."""
    if len(spans) > _MOST_SPANS:
        return
    drawn = grid.draw(spans, ranks, tick=tick)
    blocks = list(drawn.blocks(screen.width))
    count = max(1, _MOST_LINES // (len(drawn.lines) + 1))
    for block in blocks[:count]:
        screen.print()
        for label, row in block:
            screen.print(_coloured(label, row), no_wrap=True, crop=False, soft_wrap=True)
    if len(blocks) > count:
        screen.print(f"\n{len(blocks) - count} more parts are left out: --out FILE.svg draws them all")


def _table(request: ScheduleRequest, line: Timeline) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("rank", "stages", "in flight", "versions", "busy"):
        table.add_column(head, justify="right")
    for rank, busy in enumerate(line.busy):
        held = ", ".join(map(str, request.program.stages_of(rank)))
        share = f"{float(busy / line.makespan):.0%}" if line.makespan else "–"
        table.add_row(str(rank), held, str(line.in_flight[rank]), str(line.versions[rank]), share)
    return table


def _coloured(label: str, row: Sequence[grid.Tick]) -> Text:
    text = Text(label, style="dim")
    for tick in row:
        text.append(tick.text, style="dim" if tick.op is None else _STYLES.get(tick.op, ""))
    text.rstrip()
    return text


# --- files --------------------------------------------------------------------------------------------


def panel(request: ScheduleRequest, line: Timeline) -> Panel:
    """The simulated timeline, for a picture."""
    about = f"bubble {float(line.bubble_fraction):.1%} of {request.bubble_of}; {_kept(line)}"
    return Panel(list(line.spans()), headline(request), about)


def write(out: Path, request: ScheduleRequest, panels: Sequence[Panel]) -> None:
    """Write a picture or the text of the program, by the suffix of `out`."""
    if out.suffix == ".txt":
        content = show(request.program).encode()
    else:
        drawn = draw_together(panels, len(request.program.ranks), "seconds")
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
