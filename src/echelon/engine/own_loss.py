"""loss=None: the loss that a model computes itself, and returns with its output."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.engine.batch import Loss
from echelon.errors import UserError
from echelon.huggingface import (
    causal_cross_entropy,
    is_plain_causal_loss,
    label_counter,
    unsplit_causal_cross_entropy,
)
from echelon.plan import Plan


def choose_loss(model: nn.Module, loss: Loss | None, plan: Plan) -> Loss:
    """The user's loss, or the model's own.

    That of causal language models is computed here, of logits and labels: so it has a meaning in a pipeline,
    and for parts of a vocabulary or of a sequence.
    """
    if loss is not None:
        return loss
    if is_plain_causal_loss(model):
        return unsplit_causal_cross_entropy if plan.precision == "fp64" else causal_cross_entropy
    return OwnLoss(model)


def shifts_labels(loss: Loss) -> bool:
    """Whether a loss takes the labels of the next positions."""
    return loss in (causal_cross_entropy, unsplit_causal_cross_entropy)


@final
class OwnLoss:
    """The loss of a model's output, a mean, with the number of labels that it is the mean of.

    A model of transformers ignores some labels. Any other model's mean is over samples.
    """

    def __init__(self, model: nn.Module) -> None:
        self._count = label_counter(model)

    def __call__(self, output: Any, labels: Any) -> Any:
        loss, count = find_loss(output), self._count(labels)
        if count is None or not isinstance(loss, Tensor):
            return loss
        # Of no labels the mean is no number, and its gradient zero.
        return torch.where(count > 0, loss, 0) * count, count


def find_loss(output: Any) -> Any:
    """`output.loss`, `output["loss"]`, the first of a tuple if it is one number, or the output itself."""
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    if getattr(output, "loss", None) is not None:
        return output.loss
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, Tensor) and first.dim() == 0:
        return first
    raise UserError(
        f"loss=None: the model returned a {type(output).__name__} without a loss, which must be output.loss, "
        "output['loss'], or the first of a tuple; give the batch the labels that the model computes it of, "
        "or give parallelize a loss"
    )
