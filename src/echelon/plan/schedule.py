"""The order of a step's work in a plan: the schedule of the pipeline, its microbatches and chunks."""

from dataclasses import dataclass
from typing import Any

from echelon.plan.field import Rule, count, described

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
