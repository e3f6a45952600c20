"""Bugs of losses: what they are divided by, and what they see."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echelon.engine import Engine
from echelon.engine.step.runtime import Microbatch, MicrobatchLoss
from echelon.nn.losses import IGNORED_TARGET
from echelon.verify.bugs.alterations import Message, alter, lose, replace_method, then


def take_mean_of_means(engine: Engine) -> bool:
    """Each loss is divided by its own count, and the sum by how many losses there are."""

    def make(loss: Callable[[Any, Microbatch], MicrobatchLoss]) -> Callable[..., MicrobatchLoss]:
        def mean_loss(output: Any, microbatch: Microbatch) -> MicrobatchLoss:
            total, count, normaliser = loss(output, microbatch)
            count = torch.as_tensor(count)
            return MicrobatchLoss(
                total / torch.where(count == 0, 1, count), (count != 0).double(), normaliser
            )

        return mean_loss

    replace_method(engine._runner, "loss", make)
    return True


def roll_targets(engine: Engine) -> bool:
    """Targets are made of a rank's own part of the tokens: at its end, the next token is its first one."""

    def make(take_part: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def take_rolled(batch: Any) -> Any:
            part = take_part(batch)
            values: Tensor = part.targets.values
            rolled = torch.where(values == IGNORED_TARGET, values, part.inputs.roll(-1, 1))
            return part._replace(targets=part.targets._replace(values=rolled))

        return take_rolled

    replace_method(engine._runner._layers, "take_part", make)
    return True


def sum_whole_logits(engine: Engine) -> bool:
    """The sum over the vocabulary is added up over ranks, as if each had not all of it already: every loss is
    larger by the logarithm of their number."""

    def multiply(message: Message) -> None:
        (numbers,) = message.tensors
        if numbers.ndim == 2:  # sums of powers, and the logits of targets; before, the largest logits came
            numbers[0] *= message.group.size

    return alter(engine.mesh.group("tensor"), "loss", then(multiply))


def keep_statistics(engine: Engine) -> bool:
    """The auxiliary losses of gates are those of a rank's own tokens."""
    return engine._balance is not None and alter(engine.mesh.group("all"), "gate statistics", lose)


def multiply_auxiliary(engine: Engine) -> bool:
    """The gradient of an auxiliary loss, which is one of the global batch, is added by each replica."""
    balance = engine._balance
    if balance is None or not balance.is_early:
        return False
    replace_method(balance, "gradient", lambda gradient: lambda *given: gradient(*given) * engine.replicas)
    return True
