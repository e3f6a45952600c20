"""Rules of which ranks share what: expert, zero, shard, sequence, context."""

from typing import TYPE_CHECKING

from echelon.plan.rule import Rule, show_stages

if TYPE_CHECKING:
    from echelon.plan.plan import Plan


def _expert_divides_data(plan: "Plan") -> str | None:
    if plan.data % plan.expert == 0:
        return None
    return (
        f"expert={plan.expert} data={plan.data}: experts are spread over the data ranks, and {plan.data} "
        f"is not divisible by {plan.expert}; set data to a multiple of {plan.expert}"
    )


def _experts_need_even_stages(plan: "Plan") -> str | None:
    if plan.expert == 1 or set(plan.replicas) == {1}:
        return None
    return (
        f"expert={plan.expert} pipeline={show_stages(plan)}: ranks with different experts compute the same "
        "layer at the same time, and replicas of a stage that take microbatches in turn do not; use the same "
        f"replicas for every stage: pipeline={plan.stages} data=N, or expert=1"
    )


def _experts_are_sharded_evenly(plan: "Plan") -> str | None:
    contexts, neighbours = plan.context, plan.expert * plan.context
    shard = plan.shard or neighbours
    is_even = shard % neighbours == 0 or contexts % shard == 0
    if is_even or (shard <= neighbours and shard % contexts == 0) or plan.expert == 1:
        return None
    return (
        f"shard={shard} expert={plan.expert} context={contexts}: groups of {shard} neighbouring ranks have "
        f"different numbers of ranks with the same experts; set shard to a multiple of {neighbours} "
        "(expert × context), or drop shard"
    )


def _server_has_no_shards(plan: "Plan") -> str | None:
    if plan.sync == "all-reduce" or plan.zero == 0:
        return None
    return (
        f"zero={plan.zero} sync={plan.sync}: the server holds the whole optimizer, so there is nothing to "
        "shard over data; use zero=0 without shard, or sync=all-reduce"
    )


def _shard_needs_zero(plan: "Plan") -> str | None:
    if plan.shard == 0 or plan.zero > 0:
        return None
    return (
        f"shard={plan.shard} zero=0: shard is how many ranks share one copy of what zero shards, and zero=0 "
        "shards nothing; set zero=1 or more (with sync=all-reduce), or drop shard"
    )


def _shard_divides_every_stage(plan: "Plan") -> str | None:
    ranks = [replicas * plan.data * plan.context for replicas in plan.replicas]
    if plan.shard == 0 or all(number % plan.shard == 0 for number in ranks):
        return None
    stage = next(stage for stage, number in enumerate(ranks) if number % plan.shard)
    return (
        f"shard={plan.shard} data={plan.data} context={plan.context} pipeline={show_stages(plan)}: ranks "
        f"that hold the same weights are divided into groups of {plan.shard}, and stage {stage} has "
        f"{ranks[stage]} of them (replicas × data × context), not divisible by {plan.shard}; set data to a "
        f"multiple of {plan.shard}, or drop shard"
    )


def _zero3_needs_even_stages(plan: "Plan") -> str | None:
    if plan.zero < 3 or set(plan.replicas) == {1}:
        return None
    return (
        f"zero=3 pipeline={show_stages(plan)}: replicas gather weights together, and those "
        "that take microbatches in turn use them at different times; use zero=2, or the same replicas for "
        f"every stage: pipeline={plan.stages} data=N"
    )


def _zero3_needs_whole_backwards(plan: "Plan") -> str | None:
    if plan.zero < 3 or plan.schedule != "zero-bubble":
        return None
    return (
        "zero=3 schedule=zero-bubble: weights are freed after the backward for inputs, and the backward for "
        "weights comes later; use zero=2, or schedule=1f1b"
    )


def _zero2_needs_replicas_in_step(plan: "Plan") -> str | None:
    one_at_a_time = plan.schedule == "naive" or plan.schedule_is_file
    if plan.zero < 2 or not one_at_a_time or set(plan.replicas) == {1}:
        return None
    return (
        f"zero={plan.zero} schedule={plan.schedule} pipeline={show_stages(plan)}: with "
        "zero=2 replicas of a stage reduce gradients together in every backward pass, and in this schedule "
        "one may wait for the other's forward meanwhile; use zero=1, or schedule=1f1b"
    )


def _sequence_needs_tensor(plan: "Plan") -> str | None:
    if not plan.sequence or plan.tensor > 1:
        return None
    return (
        "sequence=true tensor=1: sequence parallelism splits what tensor ranks would all keep; set tensor=2 "
        "or more, or drop sequence (context splits sequences by itself)"
    )


def _attention_needs_context(plan: "Plan") -> str | None:
    if plan.attention == "ring" or plan.context > 1:
        return None
    return (
        f"attention={plan.attention} context=1: it is how ranks that share a sequence attend; set "
        "context=2 or more, or drop attention"
    )


AXIS_RULES = (
    Rule(_expert_divides_data, ("data", "expert")),
    Rule(_experts_need_even_stages, ("expert", "pipeline")),
    Rule(_experts_are_sharded_evenly, ("expert", "shard", "context")),
    Rule(_server_has_no_shards, ("sync", "zero")),
    Rule(_shard_needs_zero, ("shard", "zero")),
    Rule(_shard_divides_every_stage, ("shard", "data", "context", "pipeline")),
    Rule(_zero3_needs_even_stages, ("zero", "pipeline")),
    Rule(_zero3_needs_whole_backwards, ("schedule", "zero")),
    Rule(_zero2_needs_replicas_in_step, ("zero", "schedule", "pipeline")),
    Rule(_sequence_needs_tensor, ("sequence", "tensor")),
    Rule(_attention_needs_context, ("attention", "context")),
)
