"""Cross-entropy of logits that are split by vocabulary: they are never gathered.

Ranks exchange three numbers per token: the largest logit, then the sum of powers and the target's logit.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from echelon.collectives import Group, Reduction
from echelon.entropy import VocabularyPart, summed_cross_entropy
from echelon.errors import UserError
from echelon.targets import IGNORED_TARGET

_SUBJECT = "loss"

SplitLoss = Callable[[Any, Any, Group], tuple[Tensor, Tensor | int]]


def vocabulary_cross_entropy(output: Any, targets: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """echelon.models.cross_entropy for this rank's part of the logits, [..., vocab / ranks]."""
    logits: Tensor = getattr(output, "logits", output)
    if logits.shape[:-1] != targets.shape:
        raise UserError(
            f"cross_entropy: targets must have the shape of the logits without the last dim, "
            f"{list(logits.shape[:-1])}, and have {list(targets.shape)}; reshape them"
        )
    total = summed_cross_entropy(logits.flatten(0, -2), targets.flatten(), _part(logits.shape[-1], group))
    return total, (targets != IGNORED_TARGET).sum()


def _part(columns: int, group: Group) -> VocabularyPart:
    def reduce(numbers: Tensor, op: Reduction) -> None:
        with group.ledger.about(_SUBJECT):
            group.all_reduce(numbers, op)

    return VocabularyPart(columns * group.rank, columns * group.size, reduce)


# Losses over split logits, by the full name of the loss over whole logits that they replace.
SPLIT_LOSSES: dict[str, SplitLoss] = {"echelon.models.loss.cross_entropy": vocabulary_cross_entropy}


def split_loss(loss: Callable[..., Any]) -> SplitLoss | None:
    """The version of `loss` that takes split logits; None if there is none."""
    name = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', '')}"
    return SPLIT_LOSSES.get(name)
