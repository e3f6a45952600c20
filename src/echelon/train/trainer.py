"""A whole training run: its plan, the folder, the ranks, the events that are shown and kept, and the end."""

import dataclasses
import json
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from echelon.collectives.agreement import agree_on_every_rank, decide_on_rank_0
from echelon.errors import UserError, raise_errors
from echelon.launching import TRAINING_MODULES, Ranks, join, preload
from echelon.launching.torchrun import is_under_torchrun
from echelon.models import ModelConfig
from echelon.plan import Plan
from echelon.planner.cluster.here import cluster_of_reports, devices_here, report_of_rank
from echelon.planner.searching.choice import choose
from echelon.planner.searching.request import Request, is_request
from echelon.planner.shape.presets import shape_of
from echelon.state.checkpoint.copies.folder import began
from echelon.train.checkpoints import checkpoint_folder, loss_warning, memory_of_rank
from echelon.train.events import Noted
from echelon.train.jobs.job import Job, as_plain
from echelon.train.jobs.job_rules import check, division_errors, job_errors
from echelon.train.loop import train_rank
from echelon.train.run import Run, Show, open_run
from echelon.train.runs import Preempted
from echelon.train.runs.resume import runs_of
from echelon.train.runs.run_folder import FINISHED, read_about
from echelon.train.runs.stopping import Sigterm
from echelon.train.runs.supervisor import change, fit_job, supervise
from echelon.train.task import config_of


def train(job: Job, show: Show, *, resume: Path | None = None, elastic: bool = False) -> dict[str, Any]:
    """Run `job` on the ranks of its plan and return the summary; `show` is called with every event.

    Starts the ranks on this machine; under torchrun this process is one of them already. `resume` is the
    folder of a run to go on with. `elastic`: with fewer devices or ranks than the plan takes, its data degree
    shrinks.
    """
    fit = fit_job if elastic else lambda job: job
    check(fit(job))
    if is_under_torchrun():
        return _train_among_peers(job, fit(job), show, resume)
    preload(*TRAINING_MODULES, __name__)
    with Sigterm() as sigterm, open_run(job, show, resume) as run:
        supervise(job, run, fit, sigterm)
        return run.finish()


def _train_among_peers(job: Job, fitted: Job, show: Show, resume: Path | None) -> dict[str, Any]:
    """Under torchrun rank 0 keeps the logbook; the others only train."""
    from echelon.launching.watch.watchdog import when_ended  # loaded by ranks that join, and by no others

    join()
    launch = list(agree_on_every_rank(_agent, lambda agents: sorted(set(agents))))  # the agents of all ranks
    runs: list[Run] = []

    def open_on_rank_0() -> tuple[str, dict[str, Any] | None]:
        begun = None if resume else run_of_launch(job, launch)
        if begun is not None and begun.summary is not None:
            show(Noted(f"{begun.path} had finished before its ranks were started again"))
            return str(begun.path), begun.summary
        path = resume if begun is None else begun.path
        runs.append(stack.enter_context(open_run(job, show, path, launch)))
        checkpoint_folder(job, runs[0].folder.path).remove_leftovers()
        notes = (change(job, fitted) if fitted != job else "", loss_warning(job))
        for text in filter(None, notes):
            runs[0].take(Noted(text))
        return str(runs[0].folder.path), None

    with ExitStack() as stack:
        path, summary = decide_on_rank_0(open_on_rank_0)
        folder = Path(path)
        stack.enter_context(memory_of_rank(fitted, folder))
        if summary is not None:
            return dict(summary) if dist.get_rank() == 0 else {}
        for run in runs:  # on rank 0, one
            when_ended(run.folder.fail)
        step = train_rank(fitted, folder, runs[0].take if runs else show)
        if step is not None:
            raise Preempted(step)
        return runs[0].finish() if runs else {}


# Which run the ranks of torchrun train: after a restart (--max-restarts), the one that they trained before.


class LaunchedRun(NamedTuple):
    path: Path
    summary: dict[str, Any] | None


def run_of_launch(job: Job, launch: Sequence[str]) -> LaunchedRun | None:
    """The newest run that one of these agents has begun. Not one that has finished, of another job or of this
    very process: that trains once more."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:  # another launcher, which does not start ranks again
        return None
    for path in runs_of(job):
        about = read_about(path) or {}
        agents = about.get("launch")
        if isinstance(agents, list) and set(launch) & {str(each) for each in agents}:
            if about.get("state") != FINISHED:
                return LaunchedRun(path, None)
            is_other = about.get("job") != json.loads(json.dumps(as_plain(job)))
            is_own = about.get("pid") == os.getpid()
            summary = about.get("summary")
            return None if is_other or is_own or not isinstance(summary, dict) else LaunchedRun(path, summary)
    return None


def _agent() -> str:
    """The process that started this one: no other process, of this host or another, has the same text."""
    return f"{socket.gethostname()} {os.getppid()} {began(os.getppid())}"


def with_chosen_plan(job: Job) -> tuple[Job, str]:
    """The job with a plan for the devices that are here, and why that one; a job that says its plan stays."""
    if not is_request(job.plan):
        return job, ""
    request = Request.parse(job.plan)
    any_plan = f"data={os.environ['WORLD_SIZE']}" if is_under_torchrun() else "data=1"
    raise_errors("the job", job_errors(dataclasses.replace(job, plan=any_plan)))
    config = config_of(job)
    if not isinstance(config, ModelConfig):
        raise UserError(
            f"plan '{job.plan}': the planner predicts language models; for images say a plan, like data=2"
        )
    shape = dataclasses.replace(
        shape_of(config, str(job.model.preset or "model")), sequence=job.sequence_length
    )

    def refusal(text: str) -> str | None:
        try:
            return "; ".join(division_errors(config, Plan.parse(text), job.layers)) or None
        except UserError as error:
            return "; ".join(error.errors) or error.title

    def decide(reports: list[dict[str, object]]) -> list[str]:
        found = choose(shape, cluster_of_reports(reports), job.batch, request, refusal)
        return [found.plan, found.why]

    if is_under_torchrun():
        join()
        report = report_of_rank()
        plan, why = agree_on_every_rank(lambda: report, decide)
    else:
        with Ranks(request.ranks or devices_here()) as ranks:
            plan, why = decide(ranks.run(report_of_rank))
    return dataclasses.replace(job, plan=plan), str(why)
