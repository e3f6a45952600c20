"""A microbatch, as the stages of a rank may need it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from echelon.update.numbers import Number


class MicrobatchLoss(NamedTuple):
    """The loss total of a microbatch, how much it is the total of, and what to divide it by before the
    backward pass: the count of its update, as far as it is known, by the loss scale."""

    total: Tensor
    counted: Number
    normaliser: Number


class Microbatch(NamedTuple):
    """One microbatch as a stage may need it.

    `form` names the shapes and types of its inputs, the same on all ranks; `scope` opens its place in the
    training; `normaliser` knows the counts of all losses of its step, which are multiplied by `loss_scale`.
    """

    inputs: Any
    targets: Any
    weight: int
    form: str
    scope: Callable[[], AbstractContextManager[None]] = nullcontext
    normaliser: Any = None
    loss_scale: Number = 1.0
