"""The axes of a plan: how many ranks along each, how they work together, and in which order."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.plan.field import Rule, choice, count, described, number_of

if TYPE_CHECKING:
    from echelon.plan.plan import Plan


AUTO = "auto"  # the stages are chosen by measuring the model


def _read_stages(value: Any) -> int | tuple[int, ...] | str:
    """'2' → 2 stages; '3-1' → stages of 3 and 1 replicas; '1-1' is just 2 stages; 'auto' stays."""
    if value == AUTO:
        return AUTO
    if isinstance(value, str) and "-" in value:
        value = value.split("-")
    if not isinstance(value, (list, tuple)):
        return number_of(value)
    replicas = tuple(number_of(part) for part in value)
    if len(replicas) < 2:  # replicas of a single stage are what `data` is for
        raise ValueError
    return len(replicas) if set(replicas) == {1} else replicas


def _fix_measured_shards(plan: "Plan") -> str:
    """Name stages of so many replicas where the other rules accept replicas of single stages."""
    may_replicate = plan.flushes and plan.expert == 1 and plan.zero < (2 if plan.schedule == "naive" else 3)
    stages = f"give the stages, like pipeline={plan.shard}-{plan.shard}"
    return f"set data to a multiple of {plan.shard}, or {stages if may_replicate else 'drop shard'}"


def _why_measured_shards(plan: "Plan") -> str:
    """measuring may find any number of replicas of a stage"""
    return (
        f"measuring may find any number of replicas of a stage, and groups of {plan.shard} must fit each; "
        f"data × context = {plan.data * plan.context} is not divisible by {plan.shard}"
    )


def _are_experts_uneven(plan: "Plan") -> bool:
    """Groups of `shard` neighbouring ranks have different numbers of ranks with the same experts."""
    contexts, neighbours = plan.context, plan.expert * plan.context
    shard = plan.shard or neighbours
    is_even = shard % neighbours == 0 or contexts % shard == 0
    return plan.expert > 1 and not is_even and not (shard <= neighbours and shard % contexts == 0)


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The degree along each axis."""

    data: int = count("replicas; each takes a part of the global batch", axis="data")
    tensor: int = count("ranks that share each matrix", axis="tensor")
    pipeline: int | tuple[int, ...] | str = described(
        1,
        "a number of stages, at least 1; or the replicas of each stage, like 3-1; or auto",
        _read_stages,
        "stages; `3-1`: the first stage has 3 replicas, the second 1; `auto`: measured and chosen at the "
        "start, for the running ranks",
        Rule(
            "`pipeline=auto` with `schedule=interleaved` or a file",
            ("pipeline", "schedule"),
            lambda plan: plan.schedule == "interleaved" or plan.schedule_is_file,
            "measuring finds one stage per rank, and this schedule places the stages itself",
            "use another schedule, or give the stages, like pipeline=2",
            measured=True,
        ),
        Rule(
            "`pipeline=auto`, `data` · `context` not divisible by `shard`",
            ("pipeline", "shard", "data", "context"),
            lambda plan: plan.shard > 0 and plan.data * plan.context % plan.shard > 0,
            _why_measured_shards,
            _fix_measured_shards,
            hidden=("zero", "schedule", "expert"),
            measured=True,
        ),
        Rule(
            "`pipeline=auto` with `sync=async`",
            ("pipeline", "sync"),
            lambda plan: plan.sync == "async",
            "an asynchronous worker pulls a whole model",
            "use pipeline=1",
            measured=True,
        ),
        axis="pipeline",
        options=(AUTO,),
        show=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
    )
    expert: int = count(
        "data ranks over which experts are spread",
        Rule(
            "`data` not divisible by `expert`",
            ("expert", "data"),
            lambda plan: plan.data % plan.expert > 0,
            "experts are spread over the data ranks, and {plan.data} is not divisible by {plan.expert}",
            "set data to a multiple of {plan.expert}",
        ),
        Rule(
            "`expert` with stages of different replicas",
            ("expert", "pipeline"),
            lambda plan: plan.expert > 1 and plan.replicates_stages,
            "ranks with different experts compute the same layer at the same time, and replicas of a stage "
            "that take microbatches in turn do not",
            "use the same replicas for every stage: pipeline={plan.stages} data=N, or expert=1",
        ),
        Rule(
            "`expert` with a `shard` that is no multiple of expert × context, and no part of it",
            ("shard", "expert", "context"),
            _are_experts_uneven,
            "groups of {plan.shard} neighbouring ranks have different numbers of ranks with the same experts",
            lambda plan: (
                f"set shard to a multiple of {plan.expert * plan.context} (expert × context), or drop shard"
            ),
        ),
        axis="expert",
    )
    context: int = count("ranks that share each sequence", axis="context")
    attention: str = choice(
        "ring",
        ("ring", "all-to-all"),
        "how ranks along `context` attend: keys travel, or each has a part of the heads",
        Rule(
            "`attention=all-to-all` with `context=1`",
            ("attention", "context"),
            lambda plan: plan.attention != "ring" and plan.context == 1,
            "it is how ranks that share a sequence attend",
            "set context=2 or more, or drop attention",
        ),
        axis="context",
    )


# The order of a step's work: the schedule of the pipeline, its microbatches and chunks.

# Flushed schedules empty the pipeline at the end of each step. Asynchronous ones never drain: a microbatch
# meets weights that are some updates old.
FLUSHED_SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble")
ASYNCHRONOUS_SCHEDULES = ("pipedream", "pipedream-vertical", "pipedream-2bw")
SCHEDULES = (*FLUSHED_SCHEDULES, *ASYNCHRONOUS_SCHEDULES)


def is_schedule_file(text: str) -> bool:
    """A file is recognised by its form alone: a plan is checked where the file may not exist."""
    return "/" in text or text.endswith(".txt")


def _read_schedule(value: Any) -> str:
    text = str(value)
    if text in SCHEDULES or is_schedule_file(text):
        return text
    raise ValueError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The order of work in a step."""

    schedule: str = described(
        "1f1b",
        f"one of {', '.join(SCHEDULES)}, or a file ending in .txt",
        _read_schedule,
        "order of work in the pipeline",
        Rule(
            "`schedule=interleaved`, `microbatches` not a multiple of the stages",
            ("microbatches", "pipeline"),
            lambda plan: plan.schedule == "interleaved" and plan.microbatches % plan.stages > 0,
            "the interleaved schedule sends microbatches in rounds of one per stage",
            "set microbatches to a multiple of {plan.stages}",
            hidden=("schedule",),
        ),
        Rule(
            "`schedule=interleaved` with `pipeline=3-1`",
            ("schedule", "pipeline"),
            lambda plan: plan.schedule == "interleaved" and plan.replicates_stages,
            "a rank holds chunks of the whole model, so every stage has the same ranks",
            "use pipeline={plan.stages}, or schedule=1f1b",
        ),
        Rule(
            "`schedule=pipedream-2bw` with fewer microbatches than stages",
            ("microbatches", "pipeline"),
            lambda plan: plan.schedule == "pipedream-2bw" and plan.microbatches < plan.stages,
            "two weight versions suffice only when at least as many microbatches as stages share an update",
            "set microbatches={plan.stages} or more",
            hidden=("schedule",),
        ),
        Rule(
            "`schedule=pipedream`, `-vertical` or `-2bw` with `pipeline=3-1`",
            ("schedule", "pipeline"),
            lambda plan: not plan.flushes and plan.replicates_stages,
            "replicas of a stage that take microbatches in turn would be at different weight versions",
            "use schedule=1f1b, or the same replicas for every stage: pipeline={plan.stages} data=N",
        ),
        axis="pipeline",
        options=SCHEDULES,
    )
    microbatches: int = count("parts of a replica's batch; gradients accumulate over them")
    chunks: int = count(
        "stages per rank in the interleaved schedule",
        Rule(
            "`chunks` above 1 without `schedule=interleaved`, or the reverse",
            ("schedule", "chunks"),
            lambda plan: (plan.chunks > 1) != (plan.schedule == "interleaved") and not plan.schedule_is_file,
            "several chunks per rank and the interleaved schedule go together",
            "use schedule=interleaved with chunks=2 or more, or chunks=1 with another schedule",
        ),
        Rule(
            "`chunks` above 1 with `pipeline=1`",
            ("chunks", "pipeline"),
            lambda plan: plan.chunks > 1 and plan.stages == 1 and not plan.schedule_is_file,
            "chunks are spread over the ranks of a pipeline",
            "set pipeline=2 or more, or chunks=1 with schedule=1f1b",
            hidden=("schedule",),
        ),
        axis="pipeline",
    )
