"""The results of `echelon schedule`, simulated or measured here: as JSON, on the screen, in a file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from echelon.errors import UserError, raise_errors
from echelon.hardware import usable_cores
from echelon.launching.torchrun import is_under_torchrun
from echelon.plan import Plan
from echelon.program import Op, Program, Span, Timeline, show
from echelon.program.picture import Panel, draw_together
from echelon.program.simulate import WORK
from echelon.program.text import draw
from echelon.quantities import show_seconds

if TYPE_CHECKING:
    from echelon.train.rehearsal import Rehearsal

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
_MOST_RUN_RANKS, _MOST_FORWARDS = 16, 1000  # of a program that runs here
_PLANNED, _MEASURED = "simulated with the measured costs", "measured"


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

    @property
    def headline(self) -> str:
        chunks = f", {self.chunks} chunks per rank" if self.chunks > 1 else ""
        batches = f", {self.batches} batches of" if self.batches > 1 else ","
        return f"{self.name}: {self.stages} stages{chunks}{batches} {self.microbatches} microbatches"

    def display(self, screen: Console, figures: str) -> None:
        screen.print(f"[bold]{escape(self.headline)}[/]: checked, no errors", soft_wrap=True)
        screen.print(figures, soft_wrap=True)


@final
@dataclass(frozen=True)
class SimulatedSchedule:
    """A program, and when each of its instructions runs by the costs that the user gave."""

    request: ScheduleRequest
    line: Timeline

    def summary(self) -> dict[str, Any]:
        """Return what --json prints."""
        request, line, program = self.request, self.line, self.request.program
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

    def display(self, screen: Console) -> None:
        line, bubble = self.line, self.line.bubble_fraction
        exact = f"{bubble} = " if isinstance(bubble, Fraction) and bubble.denominator < 1000 else ""
        of, seconds = self.request.bubble_of, float(line.makespan)
        self.request.display(screen, f"bubble {exact}{float(bubble):.1%} of {of}; {seconds:g} seconds")
        if len(line.program.ranks) > _MOST_RANKS:
            screen.print(f"in flight at most {max(line.in_flight)}, versions at most {max(line.versions)}")
            return
        table = _table("rank", "stages", "in flight", "versions", "busy")
        for rank, busy in enumerate(line.busy):
            held = ", ".join(map(str, line.program.stages_of(rank)))
            share = f"{float(busy / line.makespan):.0%}" if line.makespan else "–"
            table.add_row(str(rank), held, str(line.in_flight[rank]), str(line.versions[rank]), share)
        screen.print(table)
        _display_spans(screen, list(line.spans()), len(line.program.ranks))

    def panels(self) -> list[Panel]:
        line = self.line
        kept = f"in flight {_listed(line.in_flight)}"
        if max(line.versions) > 1:
            kept += f"; versions {_listed(line.versions)}"
        about = f"bubble {float(line.bubble_fraction):.1%} of {self.request.bubble_of}; {kept}"
        return [Panel(list(line.spans()), self.request.headline, about)]


@final
@dataclass(frozen=True)
class MeasuredSchedule:
    """A program as it ran here, beside a simulation with the measured costs."""

    request: ScheduleRequest
    rehearsal: "Rehearsal"

    @classmethod
    def run(cls, screen: Console, request: ScheduleRequest) -> "MeasuredSchedule":
        raise_errors(f"schedule '{request.name}'", _measuring_errors(request))
        from echelon.train.rehearsal import rehearse

        replicas = tuple(len(ranks) for ranks in request.program.placement)
        plan = Plan(
            pipeline=len(request.program.ranks) if set(replicas) == {1} else replicas,
            schedule=request.name if request.file is None else str(Path(request.file).absolute()),
            microbatches=request.microbatches,
            chunks=request.chunks if request.file is None else 1,
        )
        with screen.status(f"running '{escape(str(plan))}' on {plan.ranks} ranks of this machine …"):
            return cls(request, rehearse(plan, request.program, request.batches))

    def summary(self) -> dict[str, Any]:
        """Return what --json prints: the summary with the measured costs, and the measured figures."""
        rehearsal, model = self.rehearsal, self.rehearsal.model
        costs = {
            op.name.lower(): [float(seconds) for seconds in by_stage]
            for op, by_stage in self._costs().items()
        }
        return SimulatedSchedule(self.request, rehearsal.planned).summary() | {
            "bubble_fraction": rehearsal.planned_bubble,
            "bubble_measured": rehearsal.bubble,
            "bubbles_measured": rehearsal.bubbles,
            "seconds_measured": float(max(span.end for span in rehearsal.typical)),
            "costs_measured": costs | {"transfer": float(rehearsal.costs.transfer)},
            "model": {"family": model.family, "layers": model.layers, "width": model.width},
        }

    def display(self, screen: Console) -> None:
        self.request.display(screen, self._figures())
        rehearsal, costs = self.rehearsal, self._costs()
        table = _table("stage", *(op.name.lower().replace("_", " for ") for op in costs))
        for stage in range(self.request.program.stages):
            table.add_row(str(stage), *(show_seconds(float(by_stage[stage])) for by_stage in costs.values()))
        screen.print(table)
        durations = sorted(float(span.seconds) for span in rehearsal.typical)
        usual = durations[len(durations) // 4]
        power = 10.0 ** math.floor(math.log10(usual))
        tick = next(power * digit for digit in (5, 2, 1) if power * digit <= usual)  # … 1, 2, 5, 10 ms …
        for title, spans in ((_MEASURED, rehearsal.typical), (_PLANNED, rehearsal.planned_work)):
            screen.print(f"\n[bold]{title}[/], in milliseconds")
            milliseconds = [span._replace(start=1000 * span.start, end=1000 * span.end) for span in spans]
            _display_spans(screen, milliseconds, len(self.request.program.ranks), 1000 * tick)

    def panels(self) -> list[Panel]:
        """Draw the measured timeline above the simulated one."""
        rehearsal, request = self.rehearsal, self.request
        about = f"bubble {rehearsal.bubble:.1%} of {request.bubble_of}"
        return [
            Panel(rehearsal.typical, f"{request.headline}: {_MEASURED}", about),
            Panel(rehearsal.planned_work, _PLANNED, f"bubble {rehearsal.planned_bubble:.1%}"),
        ]

    def _figures(self) -> str:
        rehearsal = self.rehearsal
        points = 100 * (rehearsal.bubble - rehearsal.planned_bubble)
        ranks, cores = len(self.request.program.ranks), usable_cores()
        shared = f", which share {cores} cores" if ranks > cores else ""
        return (
            f"bubble of {self.request.bubble_of}: {rehearsal.bubble:.1%} measured "
            f"(median of {len(rehearsal.rounds)} turns), {rehearsal.planned_bubble:.1%} {_PLANNED}: "
            f"{points:+.1f} points\n"
            f"a GPT of {rehearsal.model.layers} blocks on {ranks} ranks of this machine{shared}; "
            f"a transfer takes {show_seconds(float(rehearsal.costs.transfer))}"
        )

    def _costs(self) -> dict[Op, Any]:
        """Return the measured seconds of each stage, by kind of work."""
        table = self.rehearsal.costs.table(self.request.program.stages)
        return {op: by_stage for op, by_stage in table.items() if any(by_stage) and op in WORK}


def _measuring_errors(request: ScheduleRequest) -> list[str]:
    program = request.program
    ranks = len(program.ranks)
    forwards = sum(instruction.op is Op.FORWARD for work in program.ranks for instruction in work)
    errors = []
    if is_under_torchrun():
        errors.append("--measure starts its own ranks: run it without torchrun")
    if not 2 <= ranks <= _MOST_RUN_RANKS:
        errors.append(f"--measure with {ranks} ranks: it needs 2 to {_MOST_RUN_RANKS}, all on this machine")
    if forwards > _MOST_FORWARDS:
        errors.append(f"--measure with {forwards} forwards: at most {_MOST_FORWARDS}; use fewer microbatches")
    if request.file is not None and program.versioned:
        errors.append("--measure: a file with weight versions cannot run; use a pipedream schedule by name")
    return errors


def write(out: Path, program: Program, panels: Sequence[Panel]) -> None:
    """Write a picture or the text of the program, by the suffix of `out`."""
    if out.suffix == ".txt":
        content = show(program).encode()
    else:
        drawn = draw_together(panels, len(program.ranks), "seconds")
        content = drawn.svg().encode() if out.suffix == ".svg" else drawn.png()
    try:
        out.write_bytes(content)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror or error}") from None


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _display_spans(
    screen: Console, spans: Sequence[Span], ranks: int, tick: int | float | None = None
) -> None:
    """Print the first parts of the grid, about two screens; a column is `tick` long."""
    if len(spans) > _MOST_SPANS:
        return
    drawn = draw(spans, ranks, tick=tick)
    blocks = list(drawn.blocks(screen.width))
    count = max(1, _MOST_LINES // (len(drawn.lines) + 1))
    for block in blocks[:count]:
        screen.print()
        for label, row in block:
            text = Text(label, style="dim")
            for each in row:
                text.append(each.text, style="dim" if each.op is None else _STYLES.get(each.op, ""))
            text.rstrip()
            screen.print(text, no_wrap=True, crop=False, soft_wrap=True)
    if len(blocks) > count:
        screen.print(f"\n{len(blocks) - count} more parts are left out: --out FILE.svg draws them all")


def _listed(counts: tuple[int, ...]) -> str:
    return ", ".join(map(str, counts)) if len(counts) <= 16 else f"at most {max(counts)}"
