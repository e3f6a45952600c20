"""Silent errors that users of other libraries have reported, as functions that break an engine in that way.

Each takes a finished engine and returns whether it has broken anything on this rank: it replaces methods, and
alters or loses messages of groups. What each of them is, and where it was reported, is a table in
docs/verify.md; `inject_bug` has their names, and the bugs of sums between ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.collectives import CompletedWork, Group, Ledger, Work
from echelon.engine import Engine
from echelon.engine.step.runtime.flight import MicrobatchLoss
from echelon.memory.recompute.segment import RecomputedLayer
from echelon.nn.dropout.training_position import current, restore
from echelon.nn.losses import IGNORED_TARGET
from echelon.nn.wrapping import W, find_wrapper
from echelon.parallel.data.batch_norm import WholeBatchNorm
from echelon.update.synchronous_update import SynchronousUpdate


class Message(NamedTuple):
    """A message that is about to be sent. `rows`: of an all-to-all, how many come from each rank, and how
    many go there."""

    group: Group
    begin: Callable[[], Work]
    tensors: Sequence[Tensor]  # where the result comes, and what is sent, if that is elsewhere
    rows: tuple[list[int], list[int]] | None


Change = Callable[[Message], Work]  # takes the place of the message's `begin`


def replace_method(owner: object, name: str, instead: Callable[..., Any]) -> None:
    """`instead` is called with the method, and then with its arguments."""
    setattr(owner, name, partial(instead, getattr(owner, name)))


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def alter(
    group: Group, subject: str, change: Change, *, operation: str | None = None, in_backward: bool = False
) -> bool:
    """Let `change` act in place of the group's messages of floating-point numbers about `subject`; of one
    operation, or of backward passes, if so asked. Returns whether the group has others to talk to."""
    if group.size == 1:
        return False
    asked = _asked_subjects(group.ledger)

    def do_altered(
        do: Any, name: str, traffic: Any, wait: bool, begin: Any, *tensors: Tensor, **options: Any
    ) -> Any:
        is_meant = asked[-1:] == [subject] and operation in (None, name)
        if is_meant and tensors[0].is_floating_point() and (is_in_backward() or not in_backward):
            message = Message(group, begin, tensors, options.get("rows"))
            return do(name, traffic, wait, lambda: change(message), *tensors, **options)
        return do(name, traffic, wait, begin, *tensors, **options)

    replace_method(group, "_do", do_altered)
    return True


def _asked_subjects(ledger: Ledger) -> list[str]:
    """The subjects that the code around a message names, innermost last. (An audit's ledger has another.)"""
    asked: list[str] = []

    @contextmanager
    def remember(about: Callable[[str], Any], subject: str) -> Iterator[None]:
        asked.append(subject)
        try:
            with about(subject):
                yield
        finally:
            asked.pop()

    replace_method(ledger, "about", remember)
    return asked


def lose(message: Message) -> Work:
    """Nothing is sent. Each rank goes on with its own part of a sum; what was to be gathered stays as it was,
    and of rows only this rank's own come."""
    rank = message.group.rank
    if message.rows is not None:
        # A rank's rows to itself lie behind those to earlier ranks, and come behind those from them.
        (incoming, outgoing), (coming, sent) = message.tensors, message.rows
        to, start = sum(coming[:rank]), sum(sent[:rank])
        incoming.zero_()
        incoming[to : to + coming[rank]] = outgoing[start : start + sent[rank]]
    elif len(message.tensors) == 2 and message.tensors[0].numel() < message.tensors[1].numel():
        part, whole = message.tensors
        part.copy_(whole.view(message.group.size, -1)[rank].view_as(part))
    return CompletedWork()


def then(act: Callable[[Message], None]) -> Change:
    """The message is sent, and `act` alters what has come."""

    def change(message: Message) -> Work:
        message.begin().wait()
        act(message)
        return CompletedWork()

    return change


def take_mean_of_means(engine: Engine) -> bool:
    """Each loss is divided by its own count, and the sum by how many losses there are."""

    def mean_loss(loss: Callable[..., MicrobatchLoss], *args: Any) -> MicrobatchLoss:
        made = loss(*args)
        count = float(made.counted)
        return made._replace(factors=(*made.factors, 1 / (count or 1.0)), counted=float(count != 0))

    replace_method(engine._runner.losses, "of", mean_loss)
    return True


def roll_targets(engine: Engine) -> bool:
    """Targets are made of a rank's own part of the tokens: at its end, the next token is its first one."""

    def take_rolled(take_part: Callable[[Any], Any], batch: Any) -> Any:
        part = take_part(batch)
        values: Tensor = part.targets.values
        rolled = torch.where(values == IGNORED_TARGET, values, part.inputs.roll(-1, 1))
        return part._replace(targets=part.targets._replace(values=rolled))

    replace_method(engine._runner._layers, "take_part", take_rolled)
    return True


def sum_whole_logits(engine: Engine) -> bool:
    """Ranks add up their sums over the vocabulary, which are whole: losses grow by the logarithm of ranks."""

    def multiply(message: Message) -> None:
        gathered, _ = message.tensors  # of each rank the logarithms of its sums, and the logits of targets
        gathered[:, 0] += math.log(message.group.size)

    return alter(engine.mesh.group("tensor"), "loss", then(multiply))


def keep_statistics(engine: Engine) -> bool:
    """The auxiliary losses of gates are those of a rank's own tokens."""
    return engine._balance is not None and alter(engine.mesh.group("all"), "gate statistics", lose)


def multiply_auxiliary(engine: Engine) -> bool:
    """The gradient of an auxiliary loss, which is one of the global batch, is added by each replica."""
    balance = engine._balance
    if balance is None or not balance.has_loss:
        return False
    replace_method(balance, "gradient", lambda gradient, *given: gradient(*given) * engine.replicas)
    return True


def keep_norms_apart(engine: Engine) -> bool:
    """Each rank clips by the norm of what it holds itself."""
    update = engine._update
    assert isinstance(update, SynchronousUpdate)

    def keep_square(message: Message) -> Work:
        square = message.tensors[0][3:4].clone()  # after loss total, count and scaled count
        work = message.begin()
        work.wait()
        message.tensors[0][3:4] = square  # of an evaluation there is none
        return work

    return alter(update._group, "metrics", keep_square)


def count_first_shard(engine: Engine) -> bool:
    """Only the first rank counts its part of weights that are split over tensor ranks, and of experts."""
    for of in (sharing.parameter_set for sharing in engine._local.sharings):
        if engine.mesh.group("expert" if of.name == "experts" else "tensor").rank > 0:
            vars(of)["uncounted"] = frozenset(of.parameters.values())
    return True


def count_copies(engine: Engine) -> bool:
    """Each of several ranks that hold the same weights counts them."""
    sets = [sharing.parameter_set for sharing in engine._local.sharings]
    is_shared = any(of.uncounted for of in sets)
    for of in sets:
        vars(of)["uncounted"] = frozenset()
    return is_shared


def _wrappers(engine: Engine, kind: type[W]) -> Iterator[W]:
    for module in engine._state.modules:
        wrapper = find_wrapper(module, kind)
        if wrapper is not None:
            yield wrapper


def count_positions_from_zero(engine: Engine) -> bool:
    """The positions of each rank's part of a sequence begin at 0."""
    view = engine._runner._layers.view
    replace_method(view, "positions", lambda _, length, device: torch.arange(length, device=device))
    return True


def drop_alike(engine: Engine) -> bool:
    """Dropout draws the same masks on every replica."""
    scopes = engine._runner._scopes
    scopes._replica = 0
    return any(module.p > 0 for module in scopes._modules)


def weigh_norms_alike(engine: Engine) -> bool:
    """Batch norm takes every replica's number of samples to be this rank's own."""

    def equalise(message: Message) -> None:
        gathered, own = message.tensors
        gathered[:, -1] = own[-1]

    found = any(True for _ in _wrappers(engine, WholeBatchNorm))
    return alter(engine.mesh.group("data"), "batch norm", then(equalise), operation="all_gather") and found


def drop_again(engine: Engine) -> bool:
    """A layer that runs again for the backward pass draws new dropout masks."""

    def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        position = current()
        if position is None or not is_in_backward():
            return inner(*args, **kwargs)
        with restore(replace(position, seed=position.seed + 1)):
            return inner(*args, **kwargs)

    layers = list(_wrappers(engine, RecomputedLayer))
    for layer in layers:
        layer._next = partial(call, layer.inner)
    return bool(layers)


def mix_kept_parts(engine: Engine) -> bool:
    """The parts of a layer's input that tensor ranks kept are joined in another order."""

    def roll(message: Message) -> None:
        whole, part = message.tensors
        whole.copy_(whole.roll(part.numel()))

    return alter(engine.mesh.group("tensor"), "checkpoints", then(roll))


def route_padding(engine: Engine) -> bool:
    """Gates count what was added at the end of a sequence, so that ranks share it evenly, as its tokens."""
    gates = [] if engine._balance is None else list(engine._balance._here)
    for gate in gates:
        replace_method(gate.positions, "is_true", lambda *_: None)
    return bool(gates)
