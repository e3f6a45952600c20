"""The loss of a language model, as a total and a count.

The engine divides: only it knows how many tokens all microbatches and replicas counted together. A mean of
means would be wrong if their counts differ.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.errors import raise_errors
from echelon.nn.head.deferred import fused_cross_entropy
from echelon.nn.losses import IGNORED_TARGET


def cross_entropy(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross entropy of logits [..., vocab] against targets [...], and how many targets counted.

    `output` is the logits, or has them as `.logits`, like the output of a transformers model.
    Targets are the tokens to predict at each position (already shifted by the data); a target of -100 is left
    out of both numbers. Computed in float32 at least.

        total, count = cross_entropy(model(tokens), targets)
    """
    logits: Tensor = getattr(output, "logits", output)
    _check(logits, targets)
    total = fused_cross_entropy(logits, targets)
    if total is None:
        upcast = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(upcast, targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
    return total, (targets != IGNORED_TARGET).sum()


def _check(logits: Tensor, targets: Tensor) -> None:
    errors = []
    if logits.shape[:-1] != targets.shape or targets.ndim == 0:
        errors.append(
            f"logits are {list(logits.shape)}, targets {list(targets.shape)}: targets must have the shape of "
            "logits without the last dim"
        )
    if targets.dtype != torch.int64:
        errors.append(f"targets are {targets.dtype}: token ids must be torch.int64; call targets.long()")
    raise_errors("cross_entropy", errors)
