"""Rules of schedules of a pipeline, and its chunks."""

from typing import TYPE_CHECKING

from echelon.plan.rule import Rule, show_stages

if TYPE_CHECKING:
    from echelon.plan.plan import Plan


def _chunks_need_interleaved(plan: "Plan") -> str | None:
    if (plan.chunks > 1) == (plan.schedule == "interleaved") or plan.schedule_is_file:
        return None
    return (
        f"schedule={plan.schedule} chunks={plan.chunks}: several chunks per rank and the interleaved "
        "schedule go together; use schedule=interleaved with chunks=2 or more, or chunks=1 with another "
        "schedule"
    )


def _chunks_need_stages(plan: "Plan") -> str | None:
    if plan.chunks == 1 or plan.stages > 1 or plan.schedule_is_file:
        return None
    return (
        f"chunks={plan.chunks} pipeline=1: chunks are spread over the ranks of a pipeline; set pipeline=2 or "
        "more, or chunks=1 with schedule=1f1b"
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
        f"schedule=interleaved pipeline={show_stages(plan)}: a rank holds chunks of the "
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
    if plan.flushes or plan.zero < 3:
        return None
    return (
        f"zero=3 schedule={plan.schedule}: a stashed weight version must stay whole until its backward pass, "
        "and zero=3 frees weights after each use; use zero=1, or schedule=1f1b"
    )


def _asynchronous_schedules_need_even_stages(plan: "Plan") -> str | None:
    if plan.flushes or set(plan.replicas) == {1}:
        return None
    return (
        f"schedule={plan.schedule} pipeline={show_stages(plan)}: replicas of a stage that "
        "take microbatches in turn would be at different weight versions; use schedule=1f1b, or the same "
        f"replicas for every stage: pipeline={plan.stages} data=N"
    )


SCHEDULE_RULES = (
    Rule(_chunks_need_interleaved, ("schedule", "chunks")),
    Rule(_chunks_need_stages, ("chunks", "pipeline", "schedule")),
    Rule(_interleaved_needs_full_rounds, ("schedule", "microbatches", "pipeline")),
    Rule(_interleaved_needs_even_stages, ("schedule", "pipeline")),
    Rule(_two_versions_need_microbatches, ("schedule", "microbatches", "pipeline")),
    Rule(_stashed_versions_need_weights, ("schedule", "zero")),
    Rule(_asynchronous_schedules_need_even_stages, ("schedule", "pipeline")),
)
