"""echelon train"""

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.options import Json, PlanText, Settings, console, print_json
from echelon.cli.signals import ctrl_c_keeps_notes
from echelon.launching import start_fork_server
from echelon.launching.torchrun import is_under_torchrun

JobOrRun = Annotated[
    Path | None,
    typer.Argument(
        metavar="[JOB.toml | RUN]",
        help="A job file; without one, the embedded default. With --resume also the folder of a run.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with a run from its last checkpoint: the run in the folder RUN, or the newest one of the "
        "job that has not finished. --plan, and --set of steps, save_every, keep and the like may change.",
    ),
]
Elastic = Annotated[
    bool,
    typer.Option(
        "--elastic",
        help="With fewer devices than the plan has ranks, or fewer ranks under torchrun, shrink data= to "
        "what fits; the global batch stays.",
    ),
]
Quiet = Annotated[
    int | None,
    typer.Option("--quiet", metavar="N", min=1, help="No live display: one line for every N steps."),
]


def train(
    job: JobOrRun = None,
    plan: PlanText = None,
    settings: Settings = None,
    resume: Resume = False,
    elastic: Elastic = False,
    quiet: Quiet = None,
    as_json: Json = False,
) -> None:
    """Train. Without a job file: a small GPT on two ranks, about two minutes on a laptop.

    Exit codes: 0 done; 1 a rank failed too often; 2 bad input, or diverged;

    75 SIGTERM came and all is saved (--resume goes on); 130 Ctrl-C; 143 a second SIGTERM.
    """
    if not is_under_torchrun() and (job is None or job.exists()):
        start_fork_server("echelon.train.trainer", "torch._dynamo")
    from echelon.train.display import Display, print_summary
    from echelon.train.jobs.job_file import read_job
    from echelon.train.runs.resume import resume as find_run
    from echelon.train.trainer import train as run
    from echelon.train.trainer import with_chosen_plan

    continued = find_run(job, settings or (), plan) if resume else None
    read = read_job(job, settings or (), plan) if continued is None else continued.job
    screen = console(as_json)
    job_to_run, why = with_chosen_plan(read)
    if why:
        screen.print(why, markup=False, soft_wrap=True)
    with ctrl_c_keeps_notes(), Display(job_to_run, screen, quiet) as display:
        path = None if continued is None else continued.path
        summary = run(job_to_run, display.show, resume=path, elastic=elastic)
    if not summary:  # under torchrun, only rank 0 prints
        return
    if as_json:
        print_json(summary)
    else:
        sample = Path(summary["run"]) / "sample.txt"
        text = sample.read_text(encoding="utf-8") if sample.exists() else ""  # a large model writes none
        print_summary(summary, text, screen)
