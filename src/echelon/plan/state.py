"""The training state of a plan: how replicas agree and share it, when it is updated, and where it is kept."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.plan.field import Rule, choice, described, integer, level, number_of, switch

if TYPE_CHECKING:
    from echelon.plan.plan import Plan


def _read_shard(value: Any) -> int:
    ranks = number_of(value, minimum=0)
    if ranks == 1:  # a group of one rank shards nothing
        raise ValueError
    return ranks


def _needs_single_ranks(axis: str) -> Rule:
    return Rule(
        f"`sync=async` with `{axis}` above 1",
        ("sync", axis),
        lambda plan: plan.sync == "async" and getattr(plan, axis) > 1,
        "asynchronous workers pull and push at any time, so ranks that share a layer would be at different "
        "weight versions",
        f"use sync=all-reduce, or {axis}=1",
    )


def _ranks_with_same_weights(plan: "Plan") -> list[int]:
    """For each stage, how many ranks hold its weights."""
    return [replicas * plan.data * plan.context for replicas in plan.replicas]


def _why_uneven_shards(plan: "Plan") -> str:
    """the ranks that hold the same weights are divided into groups of `shard`"""
    ranks = _ranks_with_same_weights(plan)
    stage = next(stage for stage, number in enumerate(ranks) if number % plan.shard)
    return (
        f"ranks that hold the same weights are divided into groups of {plan.shard}, and stage {stage} has "
        f"{ranks[stage]} of them (replicas × data × context), not divisible by {plan.shard}"
    )


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Agreement of replicas, and the state that they share."""

    sync: str = choice(
        "all-reduce",
        ("all-reduce", "parameter-server", "async"),
        "how replicas agree",
        Rule(
            "`sync=async` with an asynchronous schedule",
            ("sync", "schedule"),
            lambda plan: plan.sync == "async" and not plan.flushes,
            "asynchronous workers hold whole models, and this schedule is for stages",
            "use sync=all-reduce, or schedule=1f1b",
        ),
        Rule(
            "`sync=async` with a pipeline",
            ("sync", "pipeline"),
            lambda plan: plan.sync == "async" and plan.stages > 1,
            "an asynchronous worker pulls a whole model of one version",
            "use pipeline=1, or schedule=pipedream for asynchronous stages",
        ),
        _needs_single_ranks("tensor"),
        _needs_single_ranks("context"),
        _needs_single_ranks("expert"),
        axis="data",
    )
    staleness: float = described(
        math.inf,
        "an integer, at least 0, or inf",
        lambda value: math.inf if value in ("inf", math.inf) else integer(value, 0),
        "with `sync=async`: how many steps a worker may be ahead of the slowest; 0: rounds of all",
        Rule(
            "`staleness` without `sync=async`",
            ("staleness", "sync"),
            lambda plan: plan.staleness != math.inf and plan.sync != "async",
            "staleness bounds how far asynchronous workers run apart",
            "add sync=async or drop staleness",
        ),
        axis="data",
        options=("inf",),
    )
    zero: int = level(
        3,
        "sharded along `data`: nothing, optimizer, + gradients, + parameters",
        Rule(
            "`zero` above 0 with `sync=parameter-server` or `async`",
            ("zero", "sync"),
            lambda plan: plan.zero > 0 and plan.sync != "all-reduce",
            "the server holds the whole optimizer, so there is nothing to shard over data",
            "use zero=0 without shard, or sync=all-reduce",
        ),
        Rule(
            "`zero=3` with `pipeline=3-1`",
            ("zero", "pipeline"),
            lambda plan: plan.zero == 3 and plan.replicates_stages,
            "replicas gather weights together, and those that take microbatches in turn use them at "
            "different times",
            "use zero=2, or the same replicas for every stage: pipeline={plan.stages} data=N",
        ),
        Rule(
            "`zero=2` with `pipeline=3-1` and `schedule=naive` or a file",
            ("zero", "schedule", "pipeline"),
            lambda plan: (
                plan.zero >= 2
                and (plan.schedule == "naive" or plan.schedule_is_file)
                and plan.replicates_stages
            ),
            "with zero=2 replicas of a stage reduce gradients together in every backward pass, and in this "
            "schedule one may wait for the other's forward meanwhile",
            "use zero=1, or schedule=1f1b",
        ),
        Rule(
            "`zero=3` with `schedule=zero-bubble`",
            ("zero", "schedule"),
            lambda plan: plan.zero == 3 and plan.schedule == "zero-bubble",
            "weights are freed after the backward for inputs, and the backward for weights comes later",
            "use zero=2, or schedule=1f1b",
        ),
        Rule(
            "`zero=3` with an asynchronous schedule",
            ("zero", "schedule"),
            lambda plan: plan.zero == 3 and not plan.flushes,
            "a stashed weight version must stay whole until its backward pass, and zero=3 frees weights "
            "after each use",
            "use zero=1, or schedule=1f1b",
        ),
        axis="data",
    )
    shard: int = described(
        0,
        "a number of ranks, at least 2, or 0 for all that hold the same weights",
        _read_shard,
        "[hybrid sharding](data-parallel.md#hybrid-sharding): `zero` within groups of so many neighbouring "
        "ranks, all-reduce across them; 0: one group of all",
        Rule(
            "`shard` with `zero=0`",
            ("shard", "zero"),
            lambda plan: plan.shard > 0 and plan.zero == 0,
            "shard is how many ranks share one copy of what zero shards, and zero=0 shards nothing",
            "set zero=1 or more (with sync=all-reduce), or drop shard",
        ),
        Rule(
            "`data` · `context` · replicas of a stage not divisible by `shard`, for any stage",
            ("shard", "data", "context", "pipeline"),
            lambda plan: (
                plan.shard > 0 and any(ranks % plan.shard for ranks in _ranks_with_same_weights(plan))
            ),
            _why_uneven_shards,
            "set data to a multiple of {plan.shard}, or drop shard",
        ),
        axis="data",
        options=("0",),
    )


# Updates of a plan: when and where weights change, and which state is kept in host memory.


_OFFLOADS = ("optimizer", "parameters", "activations")


def _read_offload(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else list(value)
    if words in (["none"], [""]):
        return ()
    if not set(words) <= set(_OFFLOADS):
        raise ValueError
    return tuple(word for word in _OFFLOADS if word in words)


@dataclass(frozen=True, kw_only=True)
class Update:
    """Time and place of updates."""

    update: str = choice(
        "step",
        ("step", "backward", "last-backward"),
        "when a unit is updated: at the end of the step; as soon as its gradient is complete; the same after "
        "several microbatches, whose gradients add up ([page](update-in-backward.md))",
        Rule(
            "`update=backward` with several microbatches",
            ("update", "microbatches"),
            lambda plan: plan.update == "backward" and plan.microbatches > 1,
            "a gradient that is used and freed in a backward pass cannot be added to that of the next "
            "microbatch",
            "use microbatches=1, or update=last-backward, which keeps gradients until the last microbatch",
        ),
        Rule(
            "`update=backward` or `last-backward` with an asynchronous schedule",
            ("update", "schedule"),
            lambda plan: plan.update != "step" and not plan.flushes,
            "each microbatch is an update of its own, with weights that other microbatches still need",
            "use update=step, or schedule=1f1b",
        ),
        Rule(
            "`update=backward` or `last-backward` with `sync=parameter-server` or `async`",
            ("update", "sync"),
            lambda plan: plan.update != "step" and plan.sync != "all-reduce",
            "the server updates all weights when it has all gradients",
            "use update=step, or sync=all-reduce",
        ),
        Rule(
            "`update=backward` or `last-backward` with `precision=fp16`",
            ("update", "precision"),
            lambda plan: plan.update != "step" and plan.precision == "fp16",
            "whether gradients have overflowed, and the step is skipped, is known when all of them are there",
            "use precision=bf16, or update=step",
        ),
    )
    masters: bool = switch(
        True,
        "with `bf16` and `fp8`: float32 masters; `false`: updates are "
        "[rounded stochastically](update-in-backward.md#bf16-weights-without-masters)",
        Rule(
            "`masters=false` with a precision other than `bf16` and `fp8`",
            ("masters", "precision"),
            lambda plan: not plan.masters and plan.precision not in ("bf16", "fp8"),
            "it rounds updates of bf16 weights stochastically",
            "use precision=bf16, or drop masters",
        ),
        Rule(
            "`masters=false` with `sync=parameter-server` or `async`",
            ("masters", "sync"),
            lambda plan: not plan.masters and plan.sync != "all-reduce",
            "only ranks that update their own weights round them",
            "use sync=all-reduce, or drop masters",
        ),
    )
    offload: tuple[str, ...] = described(
        (),
        f"any of {', '.join(_OFFLOADS)}, joined by commas",
        _read_offload,
        "what lives in [host memory](offload.md) while unused: [weights](offload-parameters.md), "
        "[activations](offload-activations.md)",
        Rule(
            "`offload=parameters` with an asynchronous schedule",
            ("offload", "schedule"),
            lambda plan: "parameters" in plan.offload and not plan.flushes,
            "a stashed weight version must stay until its backward pass, and offload=parameters drops "
            "weights after each use",
            "use schedule=1f1b, or drop offload",
        ),
        Rule(
            "`offload=parameters` with `schedule=zero-bubble`",
            ("offload", "schedule"),
            lambda plan: "parameters" in plan.offload and plan.schedule == "zero-bubble",
            "weights are dropped after the backward for inputs, and the backward for weights comes later",
            "use schedule=1f1b, or drop offload",
        ),
        Rule(
            "`offload=parameters` with `sync=parameter-server` or `async`",
            ("offload", "sync"),
            lambda plan: "parameters" in plan.offload and plan.sync != "all-reduce",
            "the server sends all weights to the device at once",
            "use sync=all-reduce, or drop offload",
        ),
        Rule(
            "`offload=optimizer` with an asynchronous schedule",
            ("offload", "schedule"),
            lambda plan: "optimizer" in plan.offload and not plan.flushes,
            "each microbatch is an update of its own, and its weights are needed at once, so nothing hides "
            "the way to the host",
            "use schedule=1f1b, or drop offload=optimizer",
        ),
        Rule(
            "`offload=optimizer` with `sync=parameter-server` or `async`",
            ("offload", "sync"),
            lambda plan: "optimizer" in plan.offload and plan.sync != "all-reduce",
            "a server updates the weights, and the optimizer is not on the ranks that train",
            "use sync=all-reduce, or drop offload=optimizer",
        ),
        options=_OFFLOADS,
        show=lambda value: ",".join(value) or "none",
    )
    delay: int = level(
        1,
        "with `offload=optimizer`: 1 updates the weights [one step late](offload.md#one-step-late), while "
        "the next step is computed",
        Rule(
            "`delay=1` without `offload=optimizer`",
            ("delay", "offload"),
            lambda plan: plan.delay > 0 and "optimizer" not in plan.offload,
            "delay=1 lets the host update weights while the device computes the next step",
            "add offload=optimizer, or drop delay",
        ),
        Rule(
            "`delay=1` with `update=backward` or `last-backward`",
            ("delay", "update"),
            lambda plan: plan.delay > 0 and plan.update != "step",
            "with delay=1 all weights change between two steps, and update=backward changes them within one",
            "use update=step, or drop delay",
        ),
    )
