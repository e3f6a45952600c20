"""Jobs whose plan is `auto`: the plan is chosen before anything starts, and the run keeps the chosen one."""

import dataclasses
import os

from echelon.collectives.agreement import agree_on_every_rank
from echelon.errors import UserError, raise_errors
from echelon.launching import Ranks, join
from echelon.launching.torchrun import is_under_torchrun
from echelon.models import ModelConfig
from echelon.plan import Plan
from echelon.planner.cluster.here import cluster_of_reports, devices_here, report_of_rank
from echelon.planner.searching.choice import choose
from echelon.planner.searching.request import Request, is_request
from echelon.planner.shape.presets import shape_of
from echelon.train.jobs.job import Job
from echelon.train.jobs.job_rules import division_errors, job_errors
from echelon.train.task import config_of


def with_chosen_plan(job: Job) -> tuple[Job, str]:
    """The job with a plan for the devices that are here, and why that one; a job that says its plan stays."""
    if not is_request(job.plan):
        return job, ""
    request = Request.parse(job.plan)
    raise_errors("the job", job_errors(dataclasses.replace(job, plan=_any_plan())))
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


def _any_plan() -> str:
    """A plan that the other settings of a job can be checked with."""
    return f"data={os.environ['WORLD_SIZE']}" if is_under_torchrun() else "data=1"
