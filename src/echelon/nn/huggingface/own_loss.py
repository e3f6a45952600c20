"""The losses that models of transformers compute themselves, of `labels` in the batch.

Most are means over labels that are not ignored. A mean over a part of a batch needs its count beside it, so
that the parts add up. Which labels a model counts is told by its class and by the text of its forward.
"""

import inspect
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.errors import UserError
from echelon.nn.head.deferred import fused_cross_entropy
from echelon.nn.huggingface.families import ENCODERS
from echelon.nn.huggingface.modules import is_pretrained
from echelon.nn.losses import IGNORED_TARGET
from echelon.nn.wrapping import replaced_forward

_CAUSAL = ("ForCausalLM", "LMHeadModel")
# The loss of logits and labels, and nothing else.
_PLAIN_LOSS = re.compile(
    r"loss = self\.loss_function\(\s*(?:logits=)?(?:lm_)?logits,\s*(?:labels=)?labels,"
    r"\s*(?:vocab_size=)?(?:self\.[\w.]*vocab_size|logits\.shape\[-1\]),\s*\*\*kwargs,?\s*\)"
)
# What a model multiplies losses of its gates by, where it has them.
_GATE_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "router_z_loss_coef")
_ADDED_TO_LOSS = re.compile(r"\bloss (?:\+=|= loss [+*/-]) *([^\n]*)")


def is_plain_causal_loss(model: Any) -> bool:
    """Return True if the model's own loss is a function of its logits and the next labels, and no more. Then
    it can be computed wherever the logits are: the last stage of a pipeline, a part of the vocabulary."""
    kind: Any = type(model)
    if not is_pretrained(model) or replaced_forward(model) is not None or not shifts_labels(model):
        return False
    if not any(base.__name__.endswith(_CAUSAL) for base in kind.__mro__):
        return False
    text = _source(kind.forward)
    has_auxiliary = bool(getattr(model.config, "output_router_logits", False))
    additions = [term for term in _ADDED_TO_LOSS.findall(text) if has_auxiliary or "aux_loss" not in term]
    return len(_PLAIN_LOSS.findall(text)) == 1 and not additions


def gate_loss_coefficients(model: Any) -> dict[str, float]:
    """Return the coefficients of gate losses in the model's own: none, unless it outputs router logits. Such
    a loss is no mean over labels: fractions of tokens times mean probabilities, of what one call sees."""
    if not is_pretrained(model) or "aux_loss" not in _source(type(model).forward):
        return {}
    configs = [model.config, model.config.get_text_config(decoder=True)]
    if not any(getattr(config, "output_router_logits", False) for config in configs):
        return {}
    owners = [model, *configs]  # a forward reads the model's own attribute where there is one
    values = {
        name: next((getattr(owner, name) for owner in owners if hasattr(owner, name)), None)
        for name in _GATE_COEFFICIENTS
    }
    return {name: value for name, value in values.items() if value}


def causal_loss(model: Any, *, in_float64: bool) -> Callable[[Any, Tensor], tuple[Tensor, Tensor]]:
    """Return the own loss of a model for which `is_plain_causal_loss` holds; it takes shifted labels."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    own = getattr(model, "_loss_function", None)  # what the user has set
    if own is not None and own is not ForCausalLMLoss:
        return ReplacedLoss(own)
    return unsplit_causal_cross_entropy if in_float64 else causal_cross_entropy


@final
class ReplacedLoss:
    """A causal model's loss function that the user has replaced: a mean over the next labels."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function

    def __call__(self, output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Shift labels back: the function shifts them itself. The first one is lost, and predicts nothing."""
        logits = output.logits.contiguous()
        labels = torch.nn.functional.pad(targets[..., :-1], (1, 0), value=IGNORED_TARGET)
        mean = self._function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        return mean_as_total(mean, targets)


def mean_as_total(mean: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the total and count of a mean over the labels that are not ignored."""
    count = (labels != IGNORED_TARGET).sum()
    mean = mean.to(torch.promote_types(mean.dtype, torch.float32))  # a total may be more than fp16 holds
    # The mean of no labels is not a number, and its gradient is zero.
    return torch.where(count > 0, mean, 0) * count, count


def causal_cross_entropy(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the total and count of the loss of a causal model of transformers; `targets` are shifted."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    total = fused_cross_entropy(output.logits, targets)
    if total is None:
        logits, targets = output.logits.contiguous(), targets.contiguous()
        options: Any = {"num_items_in_batch": 1, "shift_labels": targets}  # the sum is divided by 1
        total = ForCausalLMLoss(logits, targets, logits.shape[-1], **options)
    return total, (targets != IGNORED_TARGET).sum()


def unsplit_causal_cross_entropy(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same of whole logits, also where ranks could each keep a part of the vocabulary.
    transformers rounds logits to float32. In a float64 training only the same rounding gives its loss."""
    return causal_cross_entropy(output, targets)


def is_plain_encoder_loss(model: Any) -> bool:
    """Return True if the own loss of an encoder is the cross entropy of logits and labels, and no more."""
    if type(model).__name__ not in ENCODERS or replaced_forward(model) is not None:
        return False
    config = model.config
    kind = getattr(config, "problem_type", None)
    is_class = config.num_labels > 1 and kind in (None, "single_label_classification")
    return is_class or not type(model).__name__.endswith(("SequenceClassification", "ImageClassification"))


def label_cross_entropy(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the total and count of the own loss of an encoder for which `is_plain_encoder_loss` holds."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        form = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise UserError(
            f"loss=None: labels are {form}: the own loss of this model takes the number of a class, as an "
            "integer; convert them, or give parallelize a loss"
        )
    total = F.cross_entropy(output.logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total, (labels != IGNORED_TARGET).sum()


def shift(labels: Tensor) -> Tensor:
    """At each position the label of the next one; the last has none."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED_TARGET)


def counts_labels(model: nn.Module) -> bool:
    """Return True if the model's own loss is a mean over labels, and not over samples."""
    if not is_pretrained(model):
        return False
    _check_reduction(model)
    return not type(model).__name__.endswith("ForCTC")


def shifts_labels(model: Any) -> bool:
    """Return True if the loss at a position is that of the next label."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    text = _source(type(model).forward)
    if "self.loss_function(" not in text:
        return "labels[..., 1:]" in text or "labels[:, 1:]" in text
    # The property `loss_function` would warn where it falls back.
    return LOSS_MAPPING.get(model.loss_type, ForCausalLMLoss) is ForCausalLMLoss


def _check_reduction(model: Any) -> None:
    if getattr(model.config, "ctc_loss_reduction", "mean") == "sum":
        raise UserError(
            "loss=None: config.ctc_loss_reduction='sum' makes the model's own loss a sum, and steps train on "
            "the mean over the global batch; set it to 'mean', or give parallelize a loss"
        )


@lru_cache(maxsize=64)
def _source(function: Any) -> str:
    """Return the text of a function; empty where there is none."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
