"""`--elastic`: a plan for fewer ranks than it names. The data degree shrinks, the global batch stays.

data=4 zero=3, and 3 devices  →  data=3 zero=3
"""

import dataclasses
import os
from collections.abc import Iterator

import torch

from echelon.errors import UserError
from echelon.launching.torchrun import is_under_torchrun
from echelon.plan import AUTO, Plan
from echelon.train.jobs.job import Job
from echelon.train.jobs.job_rules import job_errors
from echelon.train.jobs.rank_fit import most_ranks_here


def fit_job(job: Job) -> Job:
    """The job with a plan for the ranks or devices that there are; unchanged if none fits, or all is well."""
    try:
        plan = Plan.parse(job.plan)
    except UserError:
        return job
    for smaller in plans_for(plan, ranks_available(), exactly=is_under_torchrun()):
        fitted = dataclasses.replace(job, plan=str(smaller))
        if smaller == plan:
            return job
        if not job_errors(fitted):
            return fitted
    return job


def change(job: Job, fitted: Job) -> str:
    """What is said of a plan that was changed."""
    return (
        f"elastic: {ranks_available()} {'ranks' if is_under_torchrun() else 'devices'} for the plan "
        f"'{job.plan}'; training with '{fitted.plan}', and the same global batch of {job.batch}"
    )


def ranks_available() -> int:
    """Under torchrun the ranks that were started; else one for each GPU, or what the cores can bear."""
    if is_under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return torch.cuda.device_count() or most_ranks_here()


def plans_for(plan: Plan, ranks: int, *, exactly: bool) -> Iterator[Plan]:
    """The plan with the largest data degree for so many ranks, then smaller ones; `exactly`: for all of them.

    Where fewer replicas need more microbatches to keep to the rules of the plan, they get as many as keep the
    size of a microbatch.
    """
    if plan.pipeline == AUTO:
        return
    for data in range(plan.data, 0, -1):
        factor = -(-plan.data // data)
        for microbatches in dict.fromkeys((plan.microbatches, factor * plan.microbatches)):
            try:
                smaller = dataclasses.replace(plan, data=data, microbatches=microbatches)
            except UserError:
                continue
            if smaller.ranks == ranks or (smaller.ranks < ranks and not exactly):
                yield smaller
