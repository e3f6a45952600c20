"""Cross-entropy of logits that are split by vocabulary: they are never gathered.

Ranks exchange two numbers per token: log Σ exp(l) of their part, and the target's logit. Logits that wait
(nn/head) are computed with the head's matrix: no rank has even its part of them whole.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.errors import UserError
from echelon.nn.head.deferred import fused_cross_entropy
from echelon.nn.losses import IGNORED_TARGET, summed_cross_entropy
from echelon.parallel.tensor.modules import is_masked
from echelon.parallel.tensor.moves import vocabulary_part

# (output, targets, group, vocabulary): each rank has n columns, the vocabulary by ranks, rounded up. Those of
# rank r begin at r · n, and those behind the vocabulary are −inf.
SplitLoss = Callable[[Any, Any, Group, int], tuple[Tensor, Tensor | int]]


def vocabulary_cross_entropy(
    output: Any, targets: Tensor, group: Group, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """echelon.models.cross_entropy for this rank's part of the logits, [..., vocabulary / ranks]."""
    logits: Tensor = getattr(output, "logits", output)
    if logits.shape[:-1] != targets.shape:
        raise UserError(
            f"cross_entropy: targets must have the shape of the logits without the last dim, "
            f"{list(logits.shape[:-1])}, and have {list(targets.shape)}; reshape them"
        )
    total = fused_cross_entropy(logits, targets, of_part=True)
    if total is None:
        logits = _without_padding(logits, group, vocabulary)
        part = vocabulary_part(logits.shape[-1], group, vocabulary)
        total = summed_cross_entropy(logits.flatten(0, -2), targets.flatten(), part)
    return total, (targets != IGNORED_TARGET).sum()


def _without_padding(logits: Tensor, group: Group, vocabulary: int) -> Tensor:
    """Make logits of padding −inf again, in a copy, if the model changed them since (Gemma's cap)."""
    columns = logits.shape[-1]
    num_padded = min(columns, max(0, columns * (group.rank + 1) - vocabulary))
    if num_padded == 0 or is_masked(logits):
        return logits
    is_padding = torch.arange(columns, device=logits.device) >= columns - num_padded
    return logits.masked_fill(is_padding, -torch.inf)


# Losses over split logits, by the full name of the loss over whole logits that they replace.
SPLIT_LOSSES: dict[str, SplitLoss] = {
    "echelon.models.transformer.cross_entropy": vocabulary_cross_entropy,
    "echelon.nn.huggingface.own_loss.causal_cross_entropy": vocabulary_cross_entropy,
}


def split_loss(loss: Callable[..., Any]) -> SplitLoss | None:
    """The version of `loss` that takes split logits; None if there is none."""
    name = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', '')}"
    return SPLIT_LOSSES.get(name)
