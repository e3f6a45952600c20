"""echelon verify"""

from typing import Annotated

import typer
from rich.markup import escape

from echelon.cli.options import JobFile, Json, PlanText, Settings, console, print_json
from echelon.errors import UserError, did_you_mean
from echelon.launching.torchrun import is_under_torchrun

Steps = Annotated[int, typer.Option("--steps", min=1, help="How many optimizer steps to compare after.")]
InjectedBug = Annotated[
    str | None,
    typer.Option("--inject-bug", help="Break the parallel training in a known way: verify must find it."),
]


def verify(
    job: JobFile = None,
    plan: PlanText = None,
    settings: Settings = None,
    steps: Steps = 20,
    inject_bug: InjectedBug = None,
    as_json: Json = False,
) -> int:
    """Prove in float64 that a plan trains to the same weights as one device (exit 1 if it does not)."""
    from echelon.plan import Plan
    from echelon.train.job import check
    from echelon.train.job_file import read_job
    from echelon.verify import verify as run
    from echelon.verify.inject_bug import BUGS
    from echelon.verify.job_case import case_of

    if is_under_torchrun():
        raise UserError("verify starts its own ranks: run it without torchrun")
    if inject_bug is not None and inject_bug not in BUGS:
        raise UserError(f"--inject-bug {inject_bug}: there is no such bug{did_you_mean(inject_bug, BUGS)}")
    parsed_job = read_job(job, settings or (), plan)
    check(parsed_job)
    parsed = Plan.parse(parsed_job.plan)
    screen = console(as_json)
    with screen.status(
        f"training with '{escape(str(parsed))}' and on one device, {steps} steps in float64 …"
    ):
        verdict = run(case_of(parsed_job, parsed, steps), parsed, inject_bug=inject_bug)
    if as_json:
        print_json(verdict.to_dict())
    else:
        screen.print(("[green]✓[/] " if verdict.equal else "[red]✗[/] ") + escape(str(verdict)))
    return 0 if verdict.equal else 1
