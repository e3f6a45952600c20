"""Rules of pipeline=auto, whose stages are not known yet. The other rules check the plan that comes out."""

from typing import TYPE_CHECKING

from echelon.plan.rule import Rule

if TYPE_CHECKING:
    from echelon.plan.plan import Plan


def _auto_needs_one_stage_per_rank(plan: "Plan") -> str | None:
    if plan.schedule != "interleaved" and not plan.schedule_is_file:
        return None
    return (
        f"pipeline=auto schedule={plan.schedule}: measuring finds one stage per rank, and this schedule "
        "places the stages itself; use another schedule, or give the stages, like pipeline=2"
    )


def _auto_needs_shards_within_data(plan: "Plan") -> str | None:
    ranks = plan.data * plan.context
    if plan.shard == 0 or ranks % plan.shard == 0:
        return None
    stages = f"give the stages, like pipeline={plan.shard}-{plan.shard}"
    return (
        f"pipeline=auto shard={plan.shard} data={plan.data} context={plan.context}: measuring may find any "
        f"number of replicas of a stage, and groups of {plan.shard} must fit each; data × context = {ranks} "
        f"is not divisible by {plan.shard}; set data to a multiple of {plan.shard}, or "
        f"{stages if _may_replicate_stages(plan) else 'drop shard'}"
    )


def _may_replicate_stages(plan: "Plan") -> bool:
    """Whether the other rules leave replicas of single stages to a plan that is not yet divided into any."""
    in_turn = plan.flushes and plan.expert == 1
    return in_turn and plan.zero < (2 if plan.schedule == "naive" else 3)


def _auto_needs_synchronous_training(plan: "Plan") -> str | None:
    if plan.sync != "async":
        return None
    return "pipeline=auto sync=async: an asynchronous worker pulls a whole model; use pipeline=1"


_READ_BY_AUTO_SHARDS = ("pipeline", "shard", "data", "context", "zero", "schedule", "expert")

AUTO_RULES = (
    Rule(_auto_needs_one_stage_per_rank, ("pipeline", "schedule")),
    Rule(_auto_needs_shards_within_data, _READ_BY_AUTO_SHARDS),
    Rule(_auto_needs_synchronous_training, ("pipeline", "sync")),
)
