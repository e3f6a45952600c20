"""echelon schedule --measure: the schedule as it ran here, beside the plan that has the measured costs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echelon.cli.schedule_view import Shown, display_spans, headline, summary
from echelon.doctor.hardware import usable_cores
from echelon.launching.torchrun import is_under_torchrun
from echelon.plan import Plan
from echelon.program import COMPUTE, Op, Span
from echelon.program.picture import Panel
from echelon.quantities import show_seconds

if TYPE_CHECKING:
    from echelon.bench.rehearsal import Rehearsal

_MOST_RANKS, _MOST_FORWARDS = 16, 1000

_PLANNED, _MEASURED = "simulated with the measured costs", "measured"


def errors_of(shown: Shown) -> list[str]:
    """Why a program cannot be measured here."""
    ranks, work = len(shown.program.ranks), [its for rank in shown.program.ranks for its in rank]
    forwards = sum(its.op is Op.FORWARD for its in work)
    errors = []
    if is_under_torchrun():
        errors.append("--measure starts its own ranks: run it without torchrun")
    if not 2 <= ranks <= _MOST_RANKS:
        errors.append(f"--measure with {ranks} ranks: it needs 2 to {_MOST_RANKS}, all on this machine")
    if forwards > _MOST_FORWARDS:
        errors.append(f"--measure with {forwards} forwards: at most {_MOST_FORWARDS}; use fewer microbatches")
    if shown.file is not None and any(its.op is Op.STASH or its.version is not None for its in work):
        errors.append("--measure: it keeps weight versions, which only the schedules by name do")
    return errors


def measure(screen: Console, shown: Shown) -> "Rehearsal":
    """Run it."""
    from echelon.bench.rehearsal import rehearse

    plan = plan_of(shown)
    with screen.status(f"running '{escape(str(plan))}' on {plan.ranks} ranks of this machine …"):
        return rehearse(plan, shown.program, shown.batches)


def plan_of(shown: Shown) -> Plan:
    """The plan whose steps the program is."""
    replicas = tuple(len(ranks) for ranks in shown.program.placement)
    return Plan(
        pipeline=len(shown.program.ranks) if set(replicas) == {1} else replicas,
        schedule=shown.name if shown.file is None else str(Path(shown.file).absolute()),
        microbatches=shown.microbatches,
        chunks=shown.chunks if shown.file is None else 1,
    )


def measured_summary(shown: Shown, found: "Rehearsal") -> dict[str, Any]:
    """What --json prints: as without --measure, under the measured costs, and what was measured."""
    costs = {
        op.name.lower(): [float(seconds) for seconds in by_stage] for op, by_stage in _costs(found).items()
    }
    return summary(shown, found.planned) | {
        "bubble_fraction": found.planned_bubble,
        "bubble_measured": found.bubble,
        "bubbles_measured": found.bubbles,
        "seconds_measured": float(max(span.end for span in found.typical)),
        "costs_measured": costs | {"transfer": float(found.costs.transfer)},
        "model": {"family": found.model.family, "layers": found.model.layers, "width": found.model.width},
    }


def display_measured(screen: Console, shown: Shown, found: "Rehearsal") -> None:
    """What a person sees: the two bubbles, the costs, the two grids in colour."""
    screen.print(f"[bold]{escape(headline(shown))}[/]: checked, nothing is wrong", soft_wrap=True)
    screen.print(_told(shown, found), soft_wrap=True)
    screen.print(_table(found))
    tick = _tick(found.typical)
    for title, spans in ((_MEASURED, found.typical), (_PLANNED, found.planned_work)):
        screen.print(f"\n[bold]{title}[/], in milliseconds")
        thousandfold = [its._replace(start=1000 * its.start, end=1000 * its.end) for its in spans]
        display_spans(screen, thousandfold, len(shown.program.ranks), 1000 * tick)


def _tick(spans: Sequence[Span]) -> float:
    """The largest of 1, 2, 5 ms, 10 ms … (and below) that most spans are longer than."""
    durations = sorted(float(span.end - span.start) for span in spans)
    typical = durations[len(durations) // 4]
    power = 10.0 ** math.floor(math.log10(typical))
    return next(power * digit for digit in (5, 2, 1) if power * digit <= typical)


def _told(shown: Shown, found: "Rehearsal") -> str:
    points = 100 * (found.bubble - found.planned_bubble)
    ranks, cores = len(shown.program.ranks), usable_cores()
    shared = f", which share {cores} cores" if ranks > cores else ""
    return (
        f"bubble of {shown.bubble_of}: {found.bubble:.1%} measured (median of {len(found.turns)} turns), "
        f"{found.planned_bubble:.1%} {_PLANNED}: {points:+.1f} points\n"
        f"a GPT of {found.model.layers} blocks on {ranks} ranks of this machine{shared}; "
        f"a transfer takes {show_seconds(float(found.costs.transfer))}"
    )


def _table(found: "Rehearsal") -> Table:
    costs = _costs(found)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("stage", *(op.name.lower().replace("_", " for ") for op in costs)):
        table.add_column(head, justify="right")
    for stage in range(found.planned.program.stages):
        table.add_row(str(stage), *(show_seconds(float(by_stage[stage])) for by_stage in costs.values()))
    return table


def _costs(found: "Rehearsal") -> dict[Op, Any]:
    """The measured seconds of each stage, by the kinds of work that there are."""
    table = found.costs.table(found.planned.program.stages)
    return {op: by_stage for op, by_stage in table.items() if any(by_stage) and op in (*COMPUTE, Op.UPDATE)}


def panels(shown: Shown, found: "Rehearsal") -> list[Panel]:
    """Measured above, planned below."""
    return [
        Panel(
            found.typical,
            f"{headline(shown)}: {_MEASURED}",
            f"bubble {found.bubble:.1%} of {shown.bubble_of}",
        ),
        Panel(found.planned_work, _PLANNED, f"bubble {found.planned_bubble:.1%}"),
    ]
