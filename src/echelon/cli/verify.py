"""echelon verify"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.markup import escape

from echelon.cli.options import JobFile, Json, PlanText, Settings, console, print_json, read_count
from echelon.errors import UserError, raise_errors
from echelon.launching.torchrun import is_under_torchrun

if TYPE_CHECKING:
    from echelon.train.jobs.job import Job
    from echelon.verify import Precision

Steps = Annotated[
    str | None, typer.Option(metavar="INTEGER", help="Optimizer steps before comparing; 20, or 5 below fp64.")
]
PrecisionName = Annotated[
    str, typer.Option(help="fp64: equal to one device; bf16 or fp16: as close to it as rounding allows.")
]
InjectedBug = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Break the training in a known way, which verify must find: divide-twice, mean-of-replicas, …",
    ),
]


def verify(
    job: JobFile = None,
    plan: PlanText = None,
    settings: Settings = None,
    steps: Steps = None,
    precision: PrecisionName = "fp64",
    inject_bug: InjectedBug = None,
    as_json: Json = False,
) -> int:
    """Prove in float64 that a plan trains to the same weights as one device (exit 1 if it does not)."""
    from echelon.plan import Plan
    from echelon.verify import PRECISIONS
    from echelon.verify import verify as run
    from echelon.verify.inject_bug import BUGS, unknown_bug
    from echelon.verify.job_case import case_of

    if is_under_torchrun():
        raise UserError("verify starts its own ranks: run it without torchrun")
    errors: list[str] = []
    count = read_count("--steps", steps, errors) or (20 if precision == "fp64" else 5)
    if precision not in PRECISIONS:
        errors.append(f"--precision {precision}: must be {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}")
    if inject_bug is not None and inject_bug not in BUGS:
        errors.append(unknown_bug(inject_bug))
    parsed_job = _read(job, settings, plan, errors)
    parsed_plan = Plan.parse(parsed_job.plan)
    screen = console(as_json)
    activity = f"training with '{escape(str(parsed_plan))}' and on one device, {count} steps in {precision} …"
    with screen.status(activity):
        verdict = run(
            case_of(parsed_job, parsed_plan, count),
            parsed_plan,
            precision=cast("Precision", precision),
            inject_bug=inject_bug,
        )
    if as_json:
        print_json(verdict.to_dict())
    screen.print(("[green]✓[/] " if verdict.holds else "[red]✗[/] ") + escape(str(verdict)))
    return 0 if verdict.holds else 1


def _read(job: Path | None, settings: list[str] | None, plan: str | None, errors: list[str]) -> "Job":
    """Read and check the job. Its errors are listed together with those of the options."""
    from echelon.train.jobs.job_file import read_job
    from echelon.train.jobs.job_rules import check

    try:
        parsed = read_job(job, settings or (), plan)
        check(parsed)
    except UserError as refusal:
        if not errors:
            raise
        errors += refusal.errors or [refusal.title]
    raise_errors("echelon verify", errors)
    return parsed
