"""loss=None: the loss that a model computes itself, and returns with its output."""

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.huggingface.adapters import adapted_model
from echelon.nn.huggingface.own_loss import (
    ReplacedLoss,
    causal_cross_entropy,
    causal_loss,
    counts_labels,
    is_plain_causal_loss,
    is_plain_encoder_loss,
    label_cross_entropy,
    mean_as_total,
    shifts_labels,
    unsplit_causal_cross_entropy,
)
from echelon.nn.losses import IGNORED_TARGET, Loss
from echelon.plan import Plan


def choose_loss(model: nn.Module, loss: Loss | None, plan: Plan) -> Loss:
    """The user's loss, or the model's own.

    That of causal language models and of known encoders is computed here, of logits and labels: so it has a
    meaning in a pipeline, and for parts of a vocabulary or of a sequence.
    """
    if loss is not None:
        return loss
    inner = adapted_model(model)
    if is_plain_causal_loss(inner):
        return causal_loss(inner, in_float64=plan.precision == "fp64")
    return label_cross_entropy if is_plain_encoder_loss(inner) else OwnLoss(inner)


def takes_next_labels(loss: Loss) -> bool:
    """Return whether a loss counts, at each position, the label of the next one."""
    if isinstance(loss, OwnLoss):
        return loss.shifts
    return isinstance(loss, ReplacedLoss) or loss in (causal_cross_entropy, unsplit_causal_cross_entropy)


@final
class OwnLoss:
    """The loss of a model's output, a mean, with the number of labels that it is the mean of.

    A model of transformers ignores some labels. Any other model's mean is over samples.
    """

    def __init__(self, model: nn.Module) -> None:
        self._counts = counts_labels(model)
        self.shifts = self._counts and shifts_labels(model)
        self.ignore_index = _ignore_index(model)

    def __call__(self, output: Any, labels: Any) -> Any:
        loss = find_loss(output)
        is_counted = self._counts and isinstance(labels, Tensor) and not labels.is_floating_point()
        if not is_counted or not isinstance(loss, Tensor):
            return loss
        return mean_as_total(loss, labels)


def _ignore_index(model: nn.Module) -> int:
    """Return the `ignore_index` of the model, its config or a module inside of it."""
    owners = [getattr(model, "config", None), *model.modules()]
    named = [getattr(owner, "ignore_index", None) for owner in owners]
    return next((value for value in named if type(value) is int), IGNORED_TARGET)


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
