"""Replicas of a plan: how they agree on gradients, and what of the training state they share."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.plan.field import Rule, choice, described, integer, level, number_of

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
