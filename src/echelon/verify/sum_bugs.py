"""Bugs of gradients and weights on their way between ranks: sums that are left out, or scaled."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch.nn import Parameter

from echelon.collectives import CompletedWork, Group, Work
from echelon.engine import Engine
from echelon.parallel.data.reducer import Reducer
from echelon.parallel.data.sharing import Sharing
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

    def wait(self) -> set[Parameter]:
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
