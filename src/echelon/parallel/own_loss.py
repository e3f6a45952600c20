"""loss=None: the loss that a model computes itself, and returns with its output; and losses in float32."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.errors import UserError
from echelon.nn.batch import Objective
from echelon.nn.head.losses import known_loss
from echelon.nn.huggingface import own_loss as huggingface
from echelon.nn.huggingface.adapters import adapted_model, predicts_first, reason_not_passed_on
from echelon.nn.losses import IGNORED_TARGET, Loss
from echelon.parallel.tensor.modules import split_loss
from echelon.plan import Plan


@final
class ObjectiveLoss:
    """The loss that `objective(model, batch)` has computed already."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def __call__(self, output: Any, targets: Any) -> Any:  # noqa: ARG002 (an objective has no targets)
        return output


def choose_loss(model: nn.Module, loss: Loss | None, plan: Plan, objective: Objective | None = None) -> Loss:
    """The user's loss, or objective, or the model's own.

    That of causal language models and of known encoders is computed here, of logits and labels: so it has a
    meaning in a pipeline, and for parts of a vocabulary or of a sequence.
    """
    if objective is not None:
        return ObjectiveLoss(objective)
    if loss is not None:
        return loss
    inner = adapted_model(model)
    if reason_not_passed_on(model):  # tokens are added, or terms of the loss
        return OwnLoss(inner, counts_first=predicts_first(model))
    if huggingface.is_plain_causal_loss(inner):
        return huggingface.causal_loss(inner, in_float64=plan.precision == "fp64")
    return huggingface.label_cross_entropy if huggingface.is_plain_encoder_loss(inner) else OwnLoss(inner)


def takes_next_labels(loss: Loss) -> bool:
    """Return whether a loss counts, at each position, the label of the next one."""
    if isinstance(loss, OwnLoss):
        return loss.shifts
    causal = (huggingface.causal_cross_entropy, huggingface.unsplit_causal_cross_entropy)
    return isinstance(loss, huggingface.ReplacedLoss) or loss in causal


@final
class OwnLoss:
    """The loss of a model's output, a mean, with the number of labels that it is the mean of. A model of
    transformers ignores some labels. Any other model's mean is over samples."""

    def __init__(self, model: nn.Module, *, counts_first: bool = False) -> None:
        """`counts_first`: a first label counts too, although the labels are those of next positions."""
        self._counts = huggingface.counts_labels(model)
        self.shifts = self._counts and huggingface.shifts_labels(model) and not counts_first
        self.ignore_index = _ignore_index(model)

    def __call__(self, output: Any, labels: Any) -> Any:
        loss = find_loss(output)
        is_counted = self._counts and isinstance(labels, Tensor) and not labels.is_floating_point()
        if not is_counted or not isinstance(loss, Tensor):
            return loss
        return huggingface.mean_as_total(loss, labels)


def _ignore_index(model: nn.Module) -> int:
    owners = [getattr(model, "config", None), *model.modules()]
    named = [getattr(owner, "ignore_index", None) for owner in owners]
    return next((value for value in named if type(value) is int), IGNORED_TARGET)


def find_loss(output: Any) -> Any:
    """`output.loss`, `output["loss"]`, the output itself, or the first or only number of a tuple."""
    if isinstance(output, Mapping) and output.get("loss") is not None:
        return output["loss"]
    if getattr(output, "loss", None) is not None:
        return output.loss
    values = output if isinstance(output, tuple | list) else [output]
    numbers = [value for value in values if isinstance(value, Tensor) and value.dim() == 0]
    if numbers and (len(numbers) == 1 or numbers[0] is values[0]):
        return numbers[0]
    raise UserError(
        f"loss=None: the model returned a {type(output).__name__} without a loss, which must be output.loss, "
        "output['loss'], or the only number of a tuple; give the batch the labels that the model computes it "
        "of, or give parallelize a loss"
    )


# The loss in float32: what a model below float32 returns is converted before its loss.


def in_float32(loss: Loss, dtype: torch.dtype) -> Loss:
    """A loss of what a model of `dtype` returns. Those that convert logits themselves, in parts, and a loss
    that the model has computed already, are what they are."""
    if dtype.itemsize >= torch.float32.itemsize or split_loss(loss) is not None or isinstance(loss, OwnLoss):
        return loss

    def float32_loss(output: Any, targets: Any) -> Any:
        return loss(tree_map(_in_float32, output), targets)

    return known_loss(loss, float32_loss)


def _in_float32(leaf: Any) -> Any:
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):  # one that torch does not know
        return _fields_in_float32(leaf)
    is_low = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype.itemsize < 4
    return leaf.float() if is_low else leaf


def _fields_in_float32(output: Any) -> Any:
    """A copy, made without its __init__, which may compute. A frozen one may be set nowhere else."""
    converted = copy.copy(output)
    for field in dataclasses.fields(output):
        if hasattr(output, field.name):
            object.__setattr__(converted, field.name, tree_map(_in_float32, getattr(output, field.name)))
    return converted
