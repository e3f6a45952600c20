"""Rules between the fields of a plan: which combinations are invalid, and why.

A rule is checked once each of its fields is valid on its own. A valid combination that is not implemented yet
is refused by the engine, not here.
"""

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

from echelon.plan.fields import ASYNCHRONOUS_SCHEDULES, AUTO, FIELDS

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
        f"expert={plan.expert} pipeline={_show_stages(plan)}: ranks with different experts compute the same "
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


def _staleness_needs_async(plan: "Plan") -> str | None:
    if plan.sync == "async" or plan.staleness == float("inf"):
        return None
    return (
        f"staleness={plan.staleness} sync={plan.sync}: staleness bounds how far asynchronous workers run "
        "apart; add sync=async or drop staleness"
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
        f"shard={plan.shard} data={plan.data} context={plan.context} pipeline={_show_stages(plan)}: ranks "
        f"that hold the same weights are divided into groups of {plan.shard}, and stage {stage} has "
        f"{ranks[stage]} of them (replicas × data × context), not divisible by {plan.shard}; set data to a "
        f"multiple of {plan.shard}, or drop shard"
    )


def _chunks_need_interleaved(plan: "Plan") -> str | None:
    if (plan.chunks > 1) == (plan.schedule == "interleaved") or plan.schedule_is_file:
        return None
    return (
        f"schedule={plan.schedule} chunks={plan.chunks}: several chunks per rank and the interleaved "
        "schedule go together; use schedule=interleaved with chunks=2 or more, or chunks=1 with another "
        "schedule"
    )


def _interleaved_needs_full_rounds(plan: "Plan") -> str | None:
    if plan.schedule != "interleaved" or plan.microbatches % plan.stages == 0:
        return None
    return (
        f"microbatches={plan.microbatches} pipeline={plan.stages}: the interleaved schedule sends "
        f"microbatches in rounds of one per stage; set microbatches to a multiple of {plan.stages}"
    )


def _interleaved_needs_even_stages(plan: "Plan") -> str | None:
    if plan.schedule != "interleaved" or isinstance(plan.pipeline, int):
        return None
    return (
        f"schedule=interleaved pipeline={_show_stages(plan)}: a rank holds chunks of the "
        f"whole model, so every stage has the same ranks; use pipeline={plan.stages}, or schedule=1f1b"
    )


def _two_versions_need_microbatches(plan: "Plan") -> str | None:
    if plan.schedule != "pipedream-2bw" or plan.microbatches >= plan.stages:
        return None
    return (
        f"microbatches={plan.microbatches} pipeline={plan.stages}: two weight versions suffice only when at "
        f"least as many microbatches as stages share an update; set microbatches={plan.stages} or more"
    )


def _stashed_versions_need_weights(plan: "Plan") -> str | None:
    if plan.schedule not in ASYNCHRONOUS_SCHEDULES or plan.zero < 3:
        return None
    return (
        f"zero=3 schedule={plan.schedule}: a stashed weight version must stay whole until its backward pass, "
        "and zero=3 frees weights after each use; use zero=1, or schedule=1f1b"
    )


def _asynchronous_schedules_need_even_stages(plan: "Plan") -> str | None:
    if plan.schedule not in ASYNCHRONOUS_SCHEDULES or set(plan.replicas) == {1}:
        return None
    return (
        f"schedule={plan.schedule} pipeline={_show_stages(plan)}: replicas of a stage that "
        "take microbatches in turn would be at different weight versions; use schedule=1f1b, or the same "
        f"replicas for every stage: pipeline={plan.stages} data=N"
    )


def _zero3_needs_even_stages(plan: "Plan") -> str | None:
    if plan.zero < 3 or set(plan.replicas) == {1}:
        return None
    return (
        f"zero=3 pipeline={_show_stages(plan)}: replicas gather weights together, and those "
        "that take microbatches in turn use them at different times; use zero=2, or the same replicas for "
        f"every stage: pipeline={plan.stages} data=N"
    )


def _zero2_needs_replicas_in_step(plan: "Plan") -> str | None:
    one_at_a_time = plan.schedule == "naive" or plan.schedule_is_file
    if plan.zero < 2 or not one_at_a_time or set(plan.replicas) == {1}:
        return None
    return (
        f"zero={plan.zero} schedule={plan.schedule} pipeline={_show_stages(plan)}: with "
        "zero=2 replicas of a stage reduce gradients together in every backward pass, and in this schedule "
        "one may wait for the other's forward meanwhile; use zero=1, or schedule=1f1b"
    )


def _one_kind_of_asynchrony(plan: "Plan") -> str | None:
    if plan.sync != "async" or plan.schedule not in ASYNCHRONOUS_SCHEDULES:
        return None
    return (
        f"sync=async schedule={plan.schedule}: asynchronous workers hold whole models, and this schedule "
        "is for stages; use sync=all-reduce, or schedule=1f1b"
    )


def _zero3_needs_whole_backwards(plan: "Plan") -> str | None:
    if plan.zero < 3 or plan.schedule != "zero-bubble":
        return None
    return (
        "zero=3 schedule=zero-bubble: weights are freed after the backward for inputs, and the backward for "
        "weights comes later; use zero=2, or schedule=1f1b"
    )


def _async_workers_need_whole_models(plan: "Plan") -> str | None:
    if plan.sync != "async" or plan.stages == 1:
        return None
    return (
        f"sync=async pipeline={_show_stages(plan)}: an asynchronous worker pulls a whole model "
        "of one version; use pipeline=1, or schedule=pipedream for asynchronous stages"
    )


def _chunks_need_stages(plan: "Plan") -> str | None:
    if plan.chunks == 1 or plan.stages > 1 or plan.schedule_is_file:
        return None
    return (
        f"chunks={plan.chunks} pipeline=1: chunks are spread over the ranks of a pipeline; set pipeline=2 or "
        "more, or chunks=1 with schedule=1f1b"
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


def _compress_needs_uncompiled_layers(plan: "Plan") -> str | None:
    if not plan.compile or plan.compress == "none":
        return None
    return (
        f"compile=true compress={plan.compress}: a compiled layer fuses operations and chooses itself what "
        "it keeps for the backward pass, so its ReLU and pools are not seen; drop compile, or use "
        "compress=none"
    )


def _compile_needs_whole_backwards(plan: "Plan") -> str | None:
    if not plan.compile or plan.schedule != "zero-bubble":
        return None
    return (
        "compile=true schedule=zero-bubble: a compiled layer's backward pass is one piece, for inputs and "
        "weights together, so each half would do the work of both; use schedule=1f1b, or drop compile"
    )


def _same_gradients_need_low_precision(plan: "Plan") -> str | None:
    if plan.gradients == "fp32" or plan.precision in ("bf16", "fp16"):
        return None
    return (
        f"gradients={plan.gradients} precision={plan.precision}: only gradients of weights below float32 are "
        "summed in another type than the weights'; drop gradients, or use precision=bf16"
    )


def _split_checkpoints_need_whole_layers(plan: "Plan") -> str | None:
    if plan.checkpoints == "whole" or plan.recompute not in ("none", "selective"):
        return None
    return (
        f"checkpoints={plan.checkpoints} recompute={plan.recompute}: a checkpoint is the input of layers "
        "that are recomputed whole; use recompute=full, sqrt or budget:BYTES, or drop checkpoints"
    )


def _split_checkpoints_need_tensor(plan: "Plan") -> str | None:
    if plan.checkpoints == "whole" or (plan.tensor > 1 and not plan.sequence):
        return None
    return (
        f"checkpoints={plan.checkpoints} tensor={plan.tensor} sequence={str(plan.sequence).lower()}: what "
        "all tensor ranks keep alike is divided among them, and with sequence=true each has only its part; "
        "set tensor=2 or more without sequence, or drop checkpoints"
    )


def _contiguous_needs_checkpoints_or_gradients(plan: "Plan") -> str | None:
    if not plan.contiguous or plan.recompute not in ("none", "selective") or plan.zero >= 2:
        return None
    return (
        f"contiguous=true recompute={plan.recompute} zero={plan.zero}: there are no inputs of recomputed "
        "layers and no gradients on their way to lie in one memory; use recompute=full, sqrt or "
        "budget:BYTES, or zero=2 or 3, or drop contiguous"
    )


def _update_in_backward_needs_one_microbatch(plan: "Plan") -> str | None:
    if plan.update != "backward" or plan.microbatches == 1:
        return None
    return (
        f"update=backward microbatches={plan.microbatches}: a gradient that is used and freed in a backward "
        "pass cannot be added to that of the next microbatch; use microbatches=1, or update=last-backward, "
        "which keeps gradients until the last microbatch"
    )


def _update_in_backward_needs_flushed_schedules(plan: "Plan") -> str | None:
    if plan.update == "step" or plan.schedule not in ASYNCHRONOUS_SCHEDULES:
        return None
    return (
        f"update={plan.update} schedule={plan.schedule}: each microbatch is an update of its own, with "
        "weights that other microbatches still need; use update=step, or schedule=1f1b"
    )


def _update_in_backward_needs_all_reduce(plan: "Plan") -> str | None:
    if plan.update == "step" or plan.sync == "all-reduce":
        return None
    return (
        f"update={plan.update} sync={plan.sync}: the server updates all weights when it has all gradients; "
        "use update=step, or sync=all-reduce"
    )


def _update_in_backward_needs_no_loss_scaling(plan: "Plan") -> str | None:
    if plan.update == "step" or plan.precision != "fp16":
        return None
    return (
        f"update={plan.update} precision=fp16: whether gradients have overflowed, and the step is skipped, "
        "is known when all of them are there; use precision=bf16, or update=step"
    )


def _no_masters_need_bf16(plan: "Plan") -> str | None:
    if plan.masters or plan.precision == "bf16":
        return None
    return (
        f"masters=false precision={plan.precision}: it rounds updates of bf16 weights stochastically; use "
        "precision=bf16, or drop masters"
    )


def _no_masters_need_all_reduce(plan: "Plan") -> str | None:
    if plan.masters or plan.sync == "all-reduce":
        return None
    return (
        f"masters=false sync={plan.sync}: only ranks that update their own weights round them; use "
        "sync=all-reduce, or drop masters"
    )


def _delay_needs_offload(plan: "Plan") -> str | None:
    if plan.delay == 0 or "optimizer" in plan.offload:
        return None
    return (
        f"delay={plan.delay} offload={FIELDS['offload'].show(plan.offload) or 'none'}: delay=1 lets the host "
        "update weights while the device computes the next step; add offload=optimizer, or drop delay"
    )


def _delay_needs_whole_updates(plan: "Plan") -> str | None:
    if plan.delay == 0 or plan.update == "step":
        return None
    return (
        f"delay={plan.delay} update={plan.update}: with delay=1 all weights change between two steps, and "
        "update=backward changes them within one; use update=step, or drop delay"
    )


def _host_updates_need_flushed_schedules(plan: "Plan") -> str | None:
    if "optimizer" not in plan.offload or plan.schedule not in ASYNCHRONOUS_SCHEDULES:
        return None
    return (
        f"offload=optimizer schedule={plan.schedule}: each microbatch is an update of its own, and its "
        "weights are needed at once, so nothing hides the way to the host; use schedule=1f1b, or drop "
        "offload=optimizer"
    )


def _host_updates_need_all_reduce(plan: "Plan") -> str | None:
    if "optimizer" not in plan.offload or plan.sync == "all-reduce":
        return None
    return (
        f"offload=optimizer sync={plan.sync}: a server updates the weights, and the optimizer is not on the "
        "ranks that train; use sync=all-reduce, or drop offload=optimizer"
    )


def _offloaded_parameters_need_flushed_schedules(plan: "Plan") -> str | None:
    if "parameters" not in plan.offload or plan.schedule not in ASYNCHRONOUS_SCHEDULES:
        return None
    return (
        f"offload=parameters schedule={plan.schedule}: a stashed weight version must stay until its backward "
        "pass, and offload=parameters drops weights after each use; use schedule=1f1b, or drop offload"
    )


def _offloaded_parameters_need_whole_backwards(plan: "Plan") -> str | None:
    if "parameters" not in plan.offload or plan.schedule != "zero-bubble":
        return None
    return (
        "offload=parameters schedule=zero-bubble: weights are dropped after the backward for inputs, and the "
        "backward for weights comes later; use schedule=1f1b, or drop offload"
    )


def _offloaded_parameters_need_all_reduce(plan: "Plan") -> str | None:
    if "parameters" not in plan.offload or plan.sync == "all-reduce":
        return None
    return (
        f"offload=parameters sync={plan.sync}: the server sends all weights to the device at once; use "
        "sync=all-reduce, or drop offload"
    )


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
    """Whether the rules above leave replicas of single stages to a plan that is not yet divided into any."""
    in_turn = plan.schedule not in ASYNCHRONOUS_SCHEDULES and plan.expert == 1
    return in_turn and plan.zero < (2 if plan.schedule == "naive" else 3)


def _auto_needs_synchronous_training(plan: "Plan") -> str | None:
    if plan.sync != "async":
        return None
    return "pipeline=auto sync=async: an asynchronous worker pulls a whole model; use pipeline=1"


def _show_stages(plan: "Plan") -> str:
    return FIELDS["pipeline"].show(plan.pipeline)


class Rule(NamedTuple):
    """A function that returns the error of a plan, or None, and the fields that it reads."""

    error: Callable[["Plan"], str | None]
    fields: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.error.__name__.removeprefix("_")


RULES: tuple[Rule, ...] = (
    Rule(_expert_divides_data, ("data", "expert")),
    Rule(_experts_need_even_stages, ("expert", "pipeline")),
    Rule(_experts_are_sharded_evenly, ("expert", "shard", "context")),
    Rule(_staleness_needs_async, ("sync", "staleness")),
    Rule(_server_has_no_shards, ("sync", "zero")),
    Rule(_shard_needs_zero, ("shard", "zero")),
    Rule(_shard_divides_every_stage, ("shard", "data", "context", "pipeline")),
    Rule(_chunks_need_interleaved, ("schedule", "chunks")),
    Rule(_interleaved_needs_full_rounds, ("schedule", "microbatches", "pipeline")),
    Rule(_interleaved_needs_even_stages, ("schedule", "pipeline")),
    Rule(_two_versions_need_microbatches, ("schedule", "microbatches", "pipeline")),
    Rule(_stashed_versions_need_weights, ("schedule", "zero")),
    Rule(_asynchronous_schedules_need_even_stages, ("schedule", "pipeline")),
    Rule(_zero3_needs_even_stages, ("zero", "pipeline")),
    Rule(_zero3_needs_whole_backwards, ("schedule", "zero")),
    Rule(_zero2_needs_replicas_in_step, ("zero", "schedule", "pipeline")),
    Rule(_one_kind_of_asynchrony, ("sync", "schedule")),
    Rule(_async_workers_need_whole_models, ("sync", "pipeline")),
    Rule(_chunks_need_stages, ("chunks", "pipeline", "schedule")),
    Rule(_sequence_needs_tensor, ("sequence", "tensor")),
    Rule(_attention_needs_context, ("attention", "context")),
    Rule(_async_workers_share_no_matrix, ("sync", "tensor")),
    Rule(_async_workers_share_no_sequence, ("sync", "context")),
    Rule(_async_workers_share_no_experts, ("sync", "expert")),
    Rule(_compile_needs_whole_backwards, ("compile", "schedule")),
    Rule(_compress_needs_uncompiled_layers, ("compile", "compress")),
    Rule(_same_gradients_need_low_precision, ("gradients", "precision")),
    Rule(_split_checkpoints_need_whole_layers, ("checkpoints", "recompute")),
    Rule(_split_checkpoints_need_tensor, ("checkpoints", "tensor", "sequence")),
    Rule(_contiguous_needs_checkpoints_or_gradients, ("contiguous", "recompute", "zero")),
    Rule(_update_in_backward_needs_one_microbatch, ("update", "microbatches")),
    Rule(_update_in_backward_needs_flushed_schedules, ("update", "schedule")),
    Rule(_update_in_backward_needs_all_reduce, ("update", "sync")),
    Rule(_update_in_backward_needs_no_loss_scaling, ("update", "precision")),
    Rule(_no_masters_need_bf16, ("masters", "precision")),
    Rule(_no_masters_need_all_reduce, ("masters", "sync")),
    Rule(_delay_needs_offload, ("delay", "offload")),
    Rule(_delay_needs_whole_updates, ("delay", "update")),
    Rule(_offloaded_parameters_need_flushed_schedules, ("offload", "schedule")),
    Rule(_offloaded_parameters_need_whole_backwards, ("offload", "schedule")),
    Rule(_offloaded_parameters_need_all_reduce, ("offload", "sync")),
    Rule(_host_updates_need_flushed_schedules, ("offload", "schedule")),
    Rule(_host_updates_need_all_reduce, ("offload", "sync")),
)

# For pipeline=auto, whose stages are not known yet. The plan that it resolves to is checked by RULES.
AUTO_RULES: tuple[Rule, ...] = (
    Rule(_auto_needs_one_stage_per_rank, ("pipeline", "schedule")),
    Rule(
        _auto_needs_shards_within_data, ("pipeline", "shard", "data", "context", "zero", "schedule", "expert")
    ),
    Rule(_auto_needs_synchronous_training, ("pipeline", "sync")),
)


def broken_rules(plan: "Plan", invalid: Collection[str] = ()) -> Iterator[str]:
    """The error of every rule that `plan` breaks. A rule that reads an `invalid` field is skipped."""
    rules = RULES
    if plan.pipeline == AUTO:
        rules = (*(rule for rule in RULES if "pipeline" not in rule.fields), *AUTO_RULES)
    for rule in rules:
        error = rule.error(plan) if not set(rule.fields) & set(invalid) else None
        if error is not None:
            yield error
