"""Rules between the fields of a plan: which combinations have no meaning, and why.

Each rule reads the fields that stand beside it in the table below, valid one by one, and returns the error
as a sentence, or None. What has a meaning but is not built yet is not refused here: the engine says so.
"""

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from echelon.plan.fields import ASYNCHRONOUS_SCHEDULES, AUTO

if TYPE_CHECKING:
    from echelon.plan.plan import Plan


def _expert_divides_data(plan: "Plan") -> str | None:
    if plan.data % plan.expert == 0:
        return None
    return (
        f"expert={plan.expert} data={plan.data}: experts are spread over the data ranks, so expert must "
        f"divide data; set data to a multiple of {plan.expert}"
    )


def _staleness_needs_async(plan: "Plan") -> str | None:
    if plan.sync == "async" or plan.staleness == float("inf"):
        return None
    return (
        f"staleness={plan.staleness} sync={plan.sync}: staleness bounds how far asynchronous workers run "
        "apart; add sync=async or drop staleness"
    )


def _server_holds_all(plan: "Plan") -> str | None:
    if plan.sync == "all-reduce" or plan.zero == 0:
        return None
    return (
        f"zero={plan.zero} sync={plan.sync}: the server holds the whole optimizer, so there is nothing to "
        "shard over data; use zero=0, or sync=all-reduce"
    )


def _chunks_are_interleaved(plan: "Plan") -> str | None:
    if (plan.chunks > 1) == (plan.schedule == "interleaved") or plan.schedule_is_file:
        return None
    return (
        f"schedule={plan.schedule} chunks={plan.chunks}: several chunks a rank and the interleaved schedule "
        "go together; use schedule=interleaved with chunks=2 or more, or chunks=1 with another schedule"
    )


def _interleaved_rounds(plan: "Plan") -> str | None:
    if plan.schedule != "interleaved" or plan.microbatches % plan.stages == 0:
        return None
    return (
        f"microbatches={plan.microbatches} pipeline={plan.stages}: the interleaved schedule sends "
        f"microbatches in rounds of one a stage; set microbatches to a multiple of {plan.stages}"
    )


def _interleaved_is_even(plan: "Plan") -> str | None:
    if plan.schedule != "interleaved" or isinstance(plan.pipeline, int):
        return None
    return (
        f"schedule=interleaved pipeline={'-'.join(map(str, plan.pipeline))}: a rank holds chunks of the "
        f"whole model, so every stage has the same ranks; use pipeline={plan.stages}, or schedule=1f1b"
    )


def _two_buffers_suffice(plan: "Plan") -> str | None:
    if plan.schedule != "pipedream-2bw" or plan.microbatches >= plan.stages:
        return None
    return (
        f"microbatches={plan.microbatches} pipeline={plan.stages}: two weight versions suffice only when at "
        f"least as many microbatches as stages share an update; set microbatches={plan.stages} or more"
    )


def _stashed_versions_are_whole(plan: "Plan") -> str | None:
    if plan.schedule not in ASYNCHRONOUS_SCHEDULES or plan.zero < 3:
        return None
    return (
        f"zero=3 schedule={plan.schedule}: a stashed weight version must stay whole until its backward pass, "
        "and zero=3 frees weights after each use; use zero=1, or schedule=1f1b"
    )


def _versions_are_one_rank_s(plan: "Plan") -> str | None:
    if plan.schedule not in ASYNCHRONOUS_SCHEDULES or set(plan.replicas) == {1}:
        return None
    return (
        f"schedule={plan.schedule} pipeline={'-'.join(map(str, plan.replicas))}: replicas of a stage that "
        "take microbatches in turn would be at different weight versions; use schedule=1f1b, or the same "
        f"replicas for every stage: pipeline={plan.stages} data=N"
    )


def _gathers_are_alike(plan: "Plan") -> str | None:
    if plan.zero < 3 or set(plan.replicas) == {1}:
        return None
    return (
        f"zero=3 pipeline={'-'.join(map(str, plan.replicas))}: replicas gather weights together, and those "
        "that take microbatches in turn use them at different times; use zero=2, or the same replicas for "
        f"every stage: pipeline={plan.stages} data=N"
    )


def _replicas_meet_in_every_backward(plan: "Plan") -> str | None:
    alone = plan.schedule == "naive" or plan.schedule_is_file
    if plan.zero < 2 or not alone or set(plan.replicas) == {1}:
        return None
    return (
        f"zero={plan.zero} schedule={plan.schedule} pipeline={'-'.join(map(str, plan.replicas))}: with "
        "zero=2 replicas meet in every backward pass, and here one may wait for another's forward meanwhile; "
        "use zero=1, or schedule=1f1b"
    )


def _one_asynchrony(plan: "Plan") -> str | None:
    if plan.sync != "async" or plan.schedule not in ASYNCHRONOUS_SCHEDULES:
        return None
    return (
        f"sync=async schedule={plan.schedule}: workers that push when they are done have no pipeline that "
        "never drains; use sync=all-reduce, or schedule=1f1b"
    )


def _weights_stay_for_both_halves(plan: "Plan") -> str | None:
    if plan.zero < 3 or plan.schedule != "zero-bubble":
        return None
    return (
        "zero=3 schedule=zero-bubble: weights are freed after the backward for inputs, and the backward for "
        "weights comes later; use zero=2, or schedule=1f1b"
    )


def _workers_have_whole_models(plan: "Plan") -> str | None:
    if plan.sync != "async" or plan.stages == 1:
        return None
    return (
        f"sync=async pipeline={'-'.join(map(str, plan.replicas))}: an asynchronous worker pulls a whole "
        "model, of one version; use pipeline=1, or schedule=pipedream for asynchronous stages"
    )


def _chunks_need_ranks(plan: "Plan") -> str | None:
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


def _workers_are_single_ranks(axis: str) -> Callable[["Plan"], str | None]:
    def rule(plan: "Plan") -> str | None:
        if plan.sync != "async" or getattr(plan, axis) == 1:
            return None
        return (
            f"sync=async {axis}={getattr(plan, axis)}: an asynchronous worker pulls and pushes at will, "
            f"and ranks that share a layer would be at different versions; use sync=all-reduce, or {axis}=1"
        )

    return rule


def _compiled_backwards_are_one(plan: "Plan") -> str | None:
    if not plan.compile or plan.schedule != "zero-bubble":
        return None
    return (
        "compile=true schedule=zero-bubble: a compiled layer's backward pass is one piece, for inputs and "
        "weights together, so each half would do the work of both; use schedule=1f1b, or drop compile"
    )


# The fields that a rule reads, and the rule.
_RULES: tuple[tuple[tuple[str, ...], Callable[["Plan"], str | None]], ...] = (
    (("data", "expert"), _expert_divides_data),
    (("sync", "staleness"), _staleness_needs_async),
    (("sync", "zero"), _server_holds_all),
    (("schedule", "chunks"), _chunks_are_interleaved),
    (("schedule", "microbatches", "pipeline"), _interleaved_rounds),
    (("schedule", "pipeline"), _interleaved_is_even),
    (("schedule", "microbatches", "pipeline"), _two_buffers_suffice),
    (("schedule", "zero"), _stashed_versions_are_whole),
    (("schedule", "pipeline"), _versions_are_one_rank_s),
    (("zero", "pipeline"), _gathers_are_alike),
    (("schedule", "zero"), _weights_stay_for_both_halves),
    (("zero", "schedule", "pipeline"), _replicas_meet_in_every_backward),
    (("sync", "schedule"), _one_asynchrony),
    (("sync", "pipeline"), _workers_have_whole_models),
    (("chunks", "pipeline", "schedule"), _chunks_need_ranks),
    (("sequence", "tensor"), _sequence_needs_tensor),
    (("sync", "tensor"), _workers_are_single_ranks("tensor")),
    (("sync", "context"), _workers_are_single_ranks("context")),
    (("compile", "schedule"), _compiled_backwards_are_one),
)


def _auto_cuts_one_stage_a_rank(plan: "Plan") -> str | None:
    if plan.schedule != "interleaved" and not plan.schedule_is_file:
        return None
    return (
        f"pipeline=auto schedule={plan.schedule}: measuring finds one stage for each rank, and this schedule "
        "says itself where stages are; use another schedule, or say the stages, like pipeline=2"
    )


def _auto_splits_whole_models(plan: "Plan") -> str | None:
    if plan.sync != "async":
        return None
    return "pipeline=auto sync=async: an asynchronous worker pulls a whole model; use pipeline=1"


# For plans whose stages are not known yet; what they become is a plan of its own, and judged then.
_RULES_OF_AUTO: tuple[tuple[tuple[str, ...], Callable[["Plan"], str | None]], ...] = (
    (("pipeline", "schedule"), _auto_cuts_one_stage_a_rank),
    (("pipeline", "sync"), _auto_splits_whole_models),
)


def broken_rules(plan: "Plan", invalid: Collection[str] = ()) -> Iterator[str]:
    """The error of every rule that `plan` breaks; a rule that reads a `invalid` field is left out."""
    rules = _RULES
    if plan.pipeline == AUTO:
        rules = (*(rule for rule in _RULES if "pipeline" not in rule[0]), *_RULES_OF_AUTO)
    for fields, rule in rules:
        error = rule(plan) if not set(fields) & set(invalid) else None
        if error is not None:
            yield error
