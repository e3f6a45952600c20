"""Whether this machine can run as many ranks as a plan has."""

import os

from echelon.launching.torchrun import is_under_torchrun
from echelon.plan import AUTO, Plan

RANKS_PER_CORE = 64  # more processes only fill the machine


def rank_error(plan: Plan) -> str | None:
    """Why the ranks of `plan` are not those that are running, or too many to start."""
    return _error_under_torchrun(plan) if is_under_torchrun() else _error_here(plan)


def ranks_on_this_host(ranks: int) -> int:
    """How many of so many ranks run on this machine; at least 1, where the launcher does not say."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", 1))) if is_under_torchrun() else ranks


def most_ranks_here() -> int:
    return RANKS_PER_CORE * (os.cpu_count() or 1)


def _error_here(plan: Plan) -> str | None:
    most = most_ranks_here()
    if plan.pipeline == AUTO or plan.ranks <= most:
        return None
    return (
        f"plan '{plan}': needs {plan.ranks} ranks, but this machine ({os.cpu_count() or 1} cores) starts at "
        f"most {most}; use fewer ranks, start them on several machines with torchrun, or add --elastic, "
        "which shrinks data= to what fits"
    )


def _error_under_torchrun(plan: Plan) -> str | None:
    running = int(os.environ["WORLD_SIZE"])
    others = plan.data * plan.tensor * plan.context
    if plan.pipeline == AUTO and running % others:
        return (
            f"plan '{plan}': torchrun started {running} ranks, and the pipeline takes what data × tensor × "
            f"context = {others} leaves; start a multiple of {others}"
        )
    if plan.pipeline == AUTO or plan.ranks == running:
        return None
    return (
        f"plan '{plan}': needs {plan.ranks} ranks, but torchrun started {running}; start torchrun with "
        f"{plan.ranks} processes in total, or change the plan{_elastic_fix(plan, running)}"
    )


def _elastic_fix(plan: Plan, running: int) -> str:
    """With fewer ranks than the plan has, another way out."""
    others = plan.ranks // plan.data
    if running >= plan.ranks or running % others:
        return ""
    return f"; or add --elastic, which trains with data={running // others} and the same global batch"
