"""Rules of asynchronous workers."""

from typing import TYPE_CHECKING

from echelon.plan.rule import Rule, show_stages

if TYPE_CHECKING:
    from echelon.plan.plan import Plan


def _staleness_needs_async(plan: "Plan") -> str | None:
    if plan.sync == "async" or plan.staleness == float("inf"):
        return None
    return (
        f"staleness={plan.staleness} sync={plan.sync}: staleness bounds how far asynchronous workers run "
        "apart; add sync=async or drop staleness"
    )


def _one_kind_of_asynchrony(plan: "Plan") -> str | None:
    if plan.sync != "async" or plan.flushes:
        return None
    return (
        f"sync=async schedule={plan.schedule}: asynchronous workers hold whole models, and this schedule "
        "is for stages; use sync=all-reduce, or schedule=1f1b"
    )


def _async_workers_need_whole_models(plan: "Plan") -> str | None:
    if plan.sync != "async" or plan.stages == 1:
        return None
    return (
        f"sync=async pipeline={show_stages(plan)}: an asynchronous worker pulls a whole model "
        "of one version; use pipeline=1, or schedule=pipedream for asynchronous stages"
    )


def _async_workers_share_no_matrix(plan: "Plan") -> str | None:
    return _async_workers_are_single_ranks(plan, "tensor", plan.tensor)


def _async_workers_share_no_sequence(plan: "Plan") -> str | None:
    return _async_workers_are_single_ranks(plan, "context", plan.context)


def _async_workers_share_no_experts(plan: "Plan") -> str | None:
    return _async_workers_are_single_ranks(plan, "expert", plan.expert)


def _async_workers_are_single_ranks(plan: "Plan", axis: str, degree: int) -> str | None:
    if plan.sync != "async" or degree == 1:
        return None
    return (
        f"sync=async {axis}={degree}: asynchronous workers pull and push at any time, so ranks that share a "
        f"layer would be at different weight versions; use sync=all-reduce, or {axis}=1"
    )


ASYNC_RULES = (
    Rule(_staleness_needs_async, ("sync", "staleness")),
    Rule(_one_kind_of_asynchrony, ("sync", "schedule")),
    Rule(_async_workers_need_whole_models, ("sync", "pipeline")),
    Rule(_async_workers_share_no_matrix, ("sync", "tensor")),
    Rule(_async_workers_share_no_sequence, ("sync", "context")),
    Rule(_async_workers_share_no_experts, ("sync", "expert")),
)
