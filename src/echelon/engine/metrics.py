"""What a step and an evaluation tell: numbers that are the same on every rank."""

from typing import NamedTuple


class Metrics(NamedTuple):
    """One training step, over the global batch.

    `loss` is the mean over everything the loss counted, `grad_norm` the norm of its gradient before
    clipping, `tokens` that count, `seconds` this rank's time. `skipped`: the weights were left as they are.
    """

    loss: float
    grad_norm: float
    tokens: int
    seconds: float
    skipped: bool = False


class Evaluation(NamedTuple):
    """The mean loss over a global batch, and how many tokens (or samples) it was taken over."""

    loss: float
    tokens: int
