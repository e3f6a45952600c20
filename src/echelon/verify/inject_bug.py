"""Known bugs, injected into the parallel training to prove that `verify` can fail: their names, and the plans
that can have them; and those of sums between ranks that are left out, or scaled. Others are in `bugs`. Where
each was reported is in docs/verify.md.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from echelon.collectives import CompletedWork, Group, Work
from echelon.engine import Engine
from echelon.errors import UserError, did_you_mean
from echelon.memory.recompute.second_run import SecondRunCheck
from echelon.parallel.data.reducer import Reducer
from echelon.parallel.data.sharing import Sharing
from echelon.plan import Plan
from echelon.verify import bugs
from echelon.verify.bugs import Change, Message, alter, lose, replace_method


def _scale(sharings: Iterable[Sharing], factor: float) -> bool:
    """Multiply gradients, after they are summed over replicas."""
    found = list(sharings)

    def reduce_and_scale(sharing: Sharing, reduce: Callable[[], None]) -> None:
        reduce()
        for local in sharing.local_parameters():
            if local.tensor.grad is not None:
                local.tensor.grad.mul_(factor)

    for sharing in found:
        replace_method(sharing, "reduce", partial(reduce_and_scale, sharing))
    return bool(found)


def divide_twice(engine: Engine) -> bool:
    """Gradients are divided by the number of replicas once more."""
    return _scale(engine._local.sharings, 1 / engine.replicas)


def multiply_by_context(engine: Engine) -> bool:
    """Losses are multiplied by the number of ranks that share a sequence, and gradients not divided by it."""
    return _scale(engine._local.sharings, engine.plan.context)


def multiply_experts(engine: Engine) -> bool:
    """The gradient of an expert has the tokens of all ranks already, and is scaled as if it had one's."""
    return _scale(_experts(engine), engine.plan.expert)


def _experts(engine: Engine) -> list[Sharing]:
    return [each for each in engine._local.sharings if each.parameter_set.name == "experts"]


def _alter_all(
    groups: Iterable[Group], subject: str, change: Change = lose, operation: str | None = None
) -> bool:
    altered = [alter(group, subject, change, operation=operation) for group in dict.fromkeys(groups)]
    return any(altered)


def skip_bucket(engine: Engine) -> bool:
    """The first gradient message of each step is not sent."""
    is_first = [True]

    def start(start_step: Callable[[], None]) -> None:
        is_first[0] = True
        start_step()

    def lose_first(message: Message) -> Work:
        sends, is_first[0] = not is_first[0], False
        return message.begin() if sends else lose(message)

    for sharing in engine._local.sharings:
        replace_method(sharing, "start_step", start)
    sets = [sharing.parameter_set for sharing in engine._local.sharings]
    groups = [group for of in sets for group in (of.group, of.shard_groups.shard)]
    return _alter_all(groups, "gradients", lose_first)


def keep_copies_apart(engine: Engine) -> bool:
    """Gradients are summed over the ranks that shard a copy of the weights, and not over the copies."""
    return _alter_all(
        (each.parameter_set.shard_groups.copies for each in engine._local.sharings), "gradients"
    )


def keep_sequences_apart(engine: Engine) -> bool:
    """Gradients are summed over replicas (here one), and not over the ranks that share a sequence."""
    return _alter_all((each.parameter_set.group for each in engine._local.sharings), "gradients")


def keep_experts_apart(engine: Engine) -> bool:
    """The gradients of experts are not summed over the ranks that hold the same ones."""
    return _alter_all((each.parameter_set.group for each in _experts(engine)), "gradients")


def _shared_over(engine: Engine, *, ties: bool) -> list[Group]:
    """Over which groups stages, or else the ranks of a stage, sum the gradient of what they share."""
    sets = [sharing.parameter_set for sharing in engine._local.sharings]
    return [each.group for of in sets for each in of.shared_gradients if (each.tie is not None) == ties]


def keep_ties_apart(engine: Engine) -> bool:
    """The first and the last stage do not sum their gradients of a shared weight."""
    return _alter_all(_shared_over(engine, ties=True), "tied gradients")


def mix_tied_parts(engine: Engine) -> bool:
    """Stages cut a shared weight into different parts, and sum elements that do not belong together."""

    def roll_and_send(message: Message) -> Work:
        (gradient,) = message.tensors
        if message.group.rank > 0:
            gradient.copy_(gradient.roll(1))
        return message.begin()

    return _alter_all(_shared_over(engine, ties=True), "tied gradients", roll_and_send)


def keep_norms_apart(engine: Engine) -> bool:
    """Gradients of weights that each tensor rank used on its part of a sequence are not summed."""
    return _alter_all(_shared_over(engine, ties=False), "tied gradients")


def keep_inputs_apart(engine: Engine) -> bool:
    """Each tensor rank goes on with the gradient of the input of its own columns, which is one summand."""
    group = engine.mesh.group("tensor")
    return alter(group, "tensor parallelism", lose, operation="all_reduce", in_backward=True)


def keep_last_microbatch(engine: Engine) -> bool:
    """Each backward pass forgets the gradients of those before it."""

    def start(sharing: Sharing, start_backward: Callable[..., None], **options: Any) -> None:
        for _, parameter in sharing.parameter_set.trained:
            parameter.grad = None
        start_backward(**options)

    for sharing in engine._local.sharings:
        replace_method(sharing, "start_backward", partial(start, sharing))
    return True


class _OwnUse:
    def __init__(self, reducer: Reducer, *_: object) -> None:
        self._reducer = reducer

    def wait(self) -> set[nn.Parameter]:
        return set(self._reducer.used)


def keep_uses_apart(engine: Engine) -> bool:
    """A rank drops the gradient of what it has not used itself, though others have."""

    reducers = [each.reducer for each in engine._local.sharings if each.reducer is not None]
    for reducer in reducers:
        replace_method(reducer, "exchange_used", partial(_OwnUse, reducer))
    return bool(reducers)


def keep_old_weights(engine: Engine) -> bool:
    """Ranks do not gather the weights that others have updated."""
    shards = (sharing.parameter_set.shard_groups.shard for sharing in engine._local.sharings)
    return _alter_all(shards, "parameters", operation="all_gather")


def lose_expert_rows(engine: Engine) -> bool:
    """Gradients of tokens that experts of other ranks have computed do not come back."""
    return alter(engine.mesh.group("expert"), "experts", lose, in_backward=True)


def lose_key_gradients(engine: Engine) -> bool:
    """Gradients of keys and values that other ranks have attended to do not come back."""
    return _alter_every_second(engine.mesh.group("context"), lose, first=False)


def attend_to_own_keys(engine: Engine) -> bool:
    """The backward pass computes with a rank's own keys and values, where those of another have come."""

    def copy(message: Message) -> Work:
        incoming, outgoing = message.tensors
        incoming.copy_(outgoing)
        return CompletedWork()

    return _alter_every_second(engine.mesh.group("context"), copy, first=True)


def _alter_every_second(group: Group, change: Change, *, first: bool) -> bool:
    """In the backward pass of a ring of two, messages take turns: keys and values, then their gradients."""
    count = [0]

    def take_turns(message: Message) -> Work:
        count[0] += 1
        return change(message) if (count[0] % 2 == 1) == first else message.begin()

    return alter(group, "context", take_turns, in_backward=True)


Bug = Callable[[Engine], object]


class NamedBug(NamedTuple):
    """`inject` breaks an engine, and returns whether it could on this rank. `needs`: which plans have such
    code, in words; `model`: what the model must have."""

    inject: Callable[[Engine], bool]
    needs: str
    is_possible: Callable[[Plan], bool]
    model: str = "trained parameters"


def _plans(needs: str) -> tuple[str, Callable[[Plan], bool]]:
    """The plans with these values ('tensor=2 or more, zero=0 or 1'), in words and as a test."""

    def is_possible(plan: Plan) -> bool:
        for name, values in (part.split("=") for part in needs.split(", ")):
            value = plan.stages if name == "pipeline" else getattr(plan, name)
            least, several, _ = values.partition(" or more")
            if not (value >= int(least) if several else str(value).lower() in values.split(" or ")):
                return False
        return True

    return needs, is_possible


_TIED = "a weight that the first and the last stage share (model.tied=true)"
_GATES = "gates with an auxiliary loss (model.experts.balance)"
_DROPOUT = "dropout (model.dropout)"

BUGS: dict[str, NamedBug] = {
    "divide-twice": NamedBug(divide_twice, *_plans("data=2 or more")),
    "skip-bucket": NamedBug(skip_bucket, *_plans("data=2 or more")),
    "mean-of-microbatches": NamedBug(bugs.take_mean_of_means, *_plans("microbatches=2 or more")),
    "mean-of-replicas": NamedBug(bugs.take_mean_of_means, *_plans("data=2 or more, microbatches=1")),
    "mean-of-context-ranks": NamedBug(
        bugs.take_mean_of_means, *_plans("context=2 or more, data=1, microbatches=1")
    ),
    "rolled-targets": NamedBug(bugs.roll_targets, *_plans("context=2 or more")),
    "whole-logits-summed": NamedBug(
        bugs.sum_whole_logits, *_plans("tensor=2 or more"), "a vocabulary that is split"
    ),
    "copies-not-summed": NamedBug(
        keep_copies_apart,
        "zero=1 or more, and a shard that is smaller than data",
        lambda plan: plan.zero > 0 and 1 < plan.shard < plan.data,
    ),
    "context-not-summed": NamedBug(keep_sequences_apart, *_plans("context=2 or more, data=1, zero=0")),
    "context-scaled": NamedBug(multiply_by_context, *_plans("context=2 or more")),
    "positions-from-zero": NamedBug(bugs.count_positions_from_zero, *_plans("context=2 or more")),
    "ring-gradients-lost": NamedBug(lose_key_gradients, *_plans("context=2, attention=ring")),
    "ring-own-keys": NamedBug(attend_to_own_keys, *_plans("context=2, attention=ring")),
    "column-inputs-not-summed": NamedBug(keep_inputs_apart, *_plans("tensor=2 or more, sequence=false")),
    "sequence-norms-not-summed": NamedBug(keep_norms_apart, *_plans("tensor=2 or more, sequence=true")),
    "tied-not-summed": NamedBug(keep_ties_apart, *_plans("pipeline=2 or more"), _TIED),
    "tied-parts-mixed": NamedBug(mix_tied_parts, *_plans("pipeline=2 or more"), _TIED),
    "last-microbatch-only": NamedBug(keep_last_microbatch, *_plans("microbatches=2 or more, zero=0 or 1")),
    "used-here-only": NamedBug(keep_uses_apart, *_plans("data=2 or more")),
    "old-weights": NamedBug(keep_old_weights, *_plans("data=2 or more, zero=1 or 2")),
    "experts-scaled": NamedBug(multiply_experts, *_plans("expert=2 or more")),
    "experts-not-summed": NamedBug(
        keep_experts_apart,
        "expert=2 or more, and more data, zero=0",
        lambda plan: plan.zero == 0 and 1 < plan.expert < plan.data,
    ),
    "expert-rows-lost": NamedBug(lose_expert_rows, *_plans("expert=2 or more")),
    "auxiliary-loss-local": NamedBug(bugs.keep_statistics, *_plans("data=2 or more"), _GATES),
    "auxiliary-loss-scaled": NamedBug(bugs.multiply_auxiliary, *_plans("data=2 or more"), _GATES),
    "padding-routed": NamedBug(
        bugs.route_padding,
        "context=2 or more, or sequence=true",
        lambda plan: plan.context > 1 or plan.sequence,
        _GATES,
    ),
    "norm-not-summed": NamedBug(
        bugs.keep_norms_apart,
        "pipeline, tensor or zero of more than one rank",
        lambda plan: plan.stages > 1 or plan.tensor > 1 or (plan.zero > 0 and plan.data > 1),
    ),
    "norm-of-first-shard": NamedBug(
        bugs.count_first_shard,
        "tensor=2 or expert=2, or more",
        lambda plan: plan.tensor > 1 or plan.expert > 1,
    ),
    "norm-counts-copies": NamedBug(
        bugs.count_copies,
        "tensor=2 or pipeline=2, or more",
        lambda plan: plan.tensor > 1 or plan.stages > 1,
        "weights that tensor ranks hold alike, or stages share",
    ),
    "dropout-alike": NamedBug(bugs.drop_alike, *_plans("data=2 or more"), _DROPOUT),
    "dropout-again": NamedBug(
        bugs.drop_again,
        "recompute=full, sqrt or a budget",
        lambda plan: plan.recompute not in ("none", "selective"),
        "layers that run again",
    ),
    "kept-parts-mixed": NamedBug(bugs.mix_kept_parts, *_plans("tensor=2 or more, checkpoints=split")),
    "batch-norm-unweighted": NamedBug(
        bugs.weigh_norms_alike,
        *_plans("data=2 or more"),
        "batch norm (task=images model.preset=resnet-50-tiny)",
    ),
}


def check_bug(name: str, plan: Plan) -> None:
    """Refuse a bug that has no such name, or that a training with this plan has no code for."""
    if name not in BUGS:
        raise UserError(unknown_bug(name))
    is_synchronous = plan.sync == "all-reduce" and plan.flushes
    if not is_synchronous or plan.update != "step":
        raise UserError(
            f"--inject-bug needs sync=all-reduce, update=step and a schedule that flushes, but the plan is "
            f"'{plan}'; change these"
        )
    if not BUGS[name].is_possible(plan):
        raise UserError(
            f"--inject-bug {name} with '{plan}': no code of this plan could have the bug; it needs "
            f"{BUGS[name].needs}"
        )


def unknown_bug(name: str) -> str:
    guess, names = did_you_mean(name, BUGS), f"; known: {', '.join(BUGS)}"
    return f"--inject-bug {name}: there is no such bug{guess.removesuffix(names)}{names}"


def inject(bug: str | Bug, engine: Engine, *, silently: bool = False) -> None:
    """Break an engine; all ranks must call this. A bug by name is refused where it has broken nothing.

    `silently`: the engine does not compare what ranks hold in its first step, which may find the bug too.
    """
    if not isinstance(bug, str):
        bug(engine)
        return
    check_bug(bug, engine.plan)
    found = torch.tensor(float(BUGS[bug].inject(engine)), device=engine.mesh.device)
    with engine.ledger.about("checks"):
        engine.mesh.group("all").all_reduce(found, "max")
    if not found:
        raise UserError(
            f"--inject-bug {bug} with '{engine.plan}': the model has nothing to break; it needs "
            f"{BUGS[bug].model}"
        )
    if silently:
        engine._runner._same_gradients = True
        engine._setup.observers.remove_kind(SecondRunCheck)
