"""Cross-entropy of logits that are split by vocabulary: they are never gathered.

With l the logits of a token, m the largest of them and y its target,

    − log softmax(l)[y] = log Σ exp(l − m) + m − l[y]

Each rank has a part of l. Ranks exchange m, then Σ and l[y]: three numbers per token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.collectives import Group
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
    wide = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    cross_entropy: Any = _CrossEntropy.apply
    total: Tensor = cross_entropy(wide, targets.flatten(), group)
    return total, (targets != IGNORED_TARGET).sum()


# Losses over split logits, by the full name of the loss over whole logits that they replace.
SPLIT_LOSSES: dict[str, SplitLoss] = {"echelon.models.loss.cross_entropy": vocabulary_cross_entropy}


def split_loss(loss: Callable[..., Any]) -> SplitLoss | None:
    """The version of `loss` that takes split logits; None if there is none."""
    name = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', '')}"
    return SPLIT_LOSSES.get(name)


class _CrossEntropy(torch.autograd.Function):
    """[tokens, vocab / ranks], [tokens] -> the sum of their losses."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group) -> Tensor:
        begin, vocab = logits.shape[1] * group.rank, logits.shape[1] * group.size
        counted = targets != IGNORED_TARGET
        if targets.device.type == "cpu" and not bool(((targets >= 0) & (targets < vocab) | ~counted).all()):
            raise IndexError(f"a target is not in the vocabulary of {vocab}")
        columns = targets - begin
        elsewhere = (columns < 0) | (columns >= logits.shape[1])
        columns = columns.masked_fill(elsewhere, 0)
        with group.ledger.about(_SUBJECT):
            largest = logits.amax(1)
            group.all_reduce(largest, "max")
            powers = (logits - largest[:, None]).exp_()
            chosen = logits.gather(1, columns[:, None])[:, 0].masked_fill(elsewhere, 0)
            both = torch.stack([powers.sum(1), chosen])
            group.all_reduce(both)
        sums, chosen = both
        ctx.save_for_backward(powers.div_(sums[:, None]), columns, elsewhere | ~counted, counted)
        losses: Tensor = sums.log() + largest - chosen
        return losses.masked_fill(~counted, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        softmax, columns, elsewhere, counted = ctx.saved_tensors
        result = softmax.clone()
        result.scatter_add_(1, columns[:, None], elsewhere.to(result.dtype).sub(1)[:, None])
        return result.mul_(counted[:, None]).mul_(gradient), None, None
