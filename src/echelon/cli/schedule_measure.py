"""echelon schedule --measure: the schedule as it ran here, beside a simulation with the measured costs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echelon.cli.schedule_view import ScheduleRequest, display_spans, headline, summary
from echelon.hardware import usable_cores
from echelon.launching.torchrun import is_under_torchrun
from echelon.plan import Plan
from echelon.program import Op, Span
from echelon.program.picture import Panel
from echelon.program.timeline import WORK
from echelon.quantities import show_seconds

if TYPE_CHECKING:
    from echelon.train.rehearsal import Rehearsal

_MOST_RANKS, _MOST_FORWARDS = 16, 1000

_PLANNED, _MEASURED = "simulated with the measured costs", "measured"


def measuring_errors(request: ScheduleRequest) -> list[str]:
    """Why a program cannot be measured here."""
    program = request.program
    ranks = len(program.ranks)
    forwards = sum(instruction.op is Op.FORWARD for work in program.ranks for instruction in work)
    errors = []
    if is_under_torchrun():
        errors.append("--measure starts its own ranks: run it without torchrun")
    if not 2 <= ranks <= _MOST_RANKS:
        errors.append(f"--measure with {ranks} ranks: it needs 2 to {_MOST_RANKS}, all on this machine")
    if forwards > _MOST_FORWARDS:
        errors.append(f"--measure with {forwards} forwards: at most {_MOST_FORWARDS}; use fewer microbatches")
    if request.file is not None and program.versioned:
        errors.append("--measure: a file with weight versions cannot run; use a pipedream schedule by name")
    return errors


def measure(screen: Console, request: ScheduleRequest) -> "Rehearsal":
    """Run the schedule on ranks of this machine."""
    from echelon.train.rehearsal import rehearse

    plan = plan_of(request)
    with screen.status(f"running '{escape(str(plan))}' on {plan.ranks} ranks of this machine …"):
        return rehearse(plan, request.program, request.batches)


def plan_of(request: ScheduleRequest) -> Plan:
    """The plan whose steps the program is."""
    replicas = tuple(len(ranks) for ranks in request.program.placement)
    return Plan(
        pipeline=len(request.program.ranks) if set(replicas) == {1} else replicas,
        schedule=request.name if request.file is None else str(Path(request.file).absolute()),
        microbatches=request.microbatches,
        chunks=request.chunks if request.file is None else 1,
    )


def measured_summary(request: ScheduleRequest, rehearsal: "Rehearsal") -> dict[str, Any]:
    """What --json prints: the summary with the measured costs, and the measured figures."""
    costs = {
        op.name.lower(): [float(seconds) for seconds in by_stage]
        for op, by_stage in _costs(rehearsal).items()
    }
    return summary(request, rehearsal.planned) | {
        "bubble_fraction": rehearsal.planned_bubble,
        "bubble_measured": rehearsal.bubble,
        "bubbles_measured": rehearsal.bubbles,
        "seconds_measured": float(max(span.end for span in rehearsal.typical)),
        "costs_measured": costs | {"transfer": float(rehearsal.costs.transfer)},
        "model": {
            "family": rehearsal.model.family,
            "layers": rehearsal.model.layers,
            "width": rehearsal.model.width,
        },
    }


def display_measured(screen: Console, request: ScheduleRequest, rehearsal: "Rehearsal") -> None:
    """Print the two bubbles, the costs, and the two grids in colour."""
    screen.print(f"[bold]{escape(headline(request))}[/]: checked, no errors", soft_wrap=True)
    screen.print(_figures(request, rehearsal), soft_wrap=True)
    screen.print(_table(rehearsal))
    tick = _tick(rehearsal.typical)
    for title, spans in ((_MEASURED, rehearsal.typical), (_PLANNED, rehearsal.planned_work)):
        screen.print(f"\n[bold]{title}[/], in milliseconds")
        milliseconds = [span._replace(start=1000 * span.start, end=1000 * span.end) for span in spans]
        display_spans(screen, milliseconds, len(request.program.ranks), 1000 * tick)


def _tick(spans: Sequence[Span]) -> float:
    """The largest of … 1, 2, 5, 10 ms … that is shorter than most spans."""
    durations = sorted(float(span.seconds) for span in spans)
    typical = durations[len(durations) // 4]
    power = 10.0 ** math.floor(math.log10(typical))
    return next(power * digit for digit in (5, 2, 1) if power * digit <= typical)


def _figures(request: ScheduleRequest, rehearsal: "Rehearsal") -> str:
    points = 100 * (rehearsal.bubble - rehearsal.planned_bubble)
    ranks, cores = len(request.program.ranks), usable_cores()
    shared = f", which share {cores} cores" if ranks > cores else ""
    return (
        f"bubble of {request.bubble_of}: {rehearsal.bubble:.1%} measured "
        f"(median of {len(rehearsal.rounds)} turns), {rehearsal.planned_bubble:.1%} {_PLANNED}: "
        f"{points:+.1f} points\n"
        f"a GPT of {rehearsal.model.layers} blocks on {ranks} ranks of this machine{shared}; "
        f"a transfer takes {show_seconds(float(rehearsal.costs.transfer))}"
    )


def _table(rehearsal: "Rehearsal") -> Table:
    costs = _costs(rehearsal)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("stage", *(op.name.lower().replace("_", " for ") for op in costs)):
        table.add_column(head, justify="right")
    for stage in range(rehearsal.planned.program.stages):
        table.add_row(str(stage), *(show_seconds(float(by_stage[stage])) for by_stage in costs.values()))
    return table


def _costs(rehearsal: "Rehearsal") -> dict[Op, Any]:
    """The measured seconds of each stage, by kind of work."""
    table = rehearsal.costs.table(rehearsal.planned.program.stages)
    return {op: by_stage for op, by_stage in table.items() if any(by_stage) and op in WORK}


def panels(request: ScheduleRequest, rehearsal: "Rehearsal") -> list[Panel]:
    """The measured timeline above the simulated one."""
    return [
        Panel(
            rehearsal.typical,
            f"{headline(request)}: {_MEASURED}",
            f"bubble {rehearsal.bubble:.1%} of {request.bubble_of}",
        ),
        Panel(rehearsal.planned_work, _PLANNED, f"bubble {rehearsal.planned_bubble:.1%}"),
    ]
