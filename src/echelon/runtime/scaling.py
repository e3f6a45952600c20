"""From the sums over ranks to what an update does with its gradients.

    sums        loss total, count, count · normaliser, squares of the gradients of total / normaliser, a flag
                for each problem
    mean        gradients · normaliser / count
    clipped     · min(1, clip / norm of the mean)

A loss scale of fp16 is part of the normaliser. Where losses are scaled, squares that are not finite are an
overflow. (Those of finite gradients are: 65,504 squared is far below the 3e38 of float32.)

On the host these are plain numbers, on a device 0-dim tensors, which nobody reads. Both compute the same.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.data_parallel import clip_factor

Number = float | Tensor


class Scaling(NamedTuple):
    """`factor` of the gradients; `norm` of the mean's, before clipping.

    `refused`: there are no samples, or there is a problem. `overflows`: gradients are not finite, though
    losses are scaled. In both cases no weight changes.
    """

    factor: Number
    refused: bool | Tensor
    overflows: bool | Tensor
    norm: Number

    @property
    def skip(self) -> bool | Tensor:
        return self.refused | self.overflows


def scale_on_host(sums: Sequence[float], clip: float | None, *, scaled: bool = False) -> Scaling:
    """`scaled`: losses have a loss scale."""
    _, count, weighted, square, *flags = sums
    refused = count == 0 or any(flags)
    overflows = scaled and not refused and not math.isfinite(square)
    mean = weighted / count / count if count else 0.0
    norm = mean * square**0.5
    return Scaling(mean * clip_factor(norm, clip), refused, overflows, norm)


def scale_on_device(sums: Tensor, clip: float | None, *, scaled: bool = False) -> Scaling:
    _, count, weighted, square = sums[:4]
    is_empty = count == 0
    refused = is_empty | sums[4:].any()
    overflows = ~refused & ~square.isfinite() if scaled else torch.zeros_like(refused)
    mean = weighted / count / count
    norm = (mean * square.sqrt()).masked_fill(is_empty, 0.0)
    return Scaling(mean * clip_factor(norm, clip), refused, overflows, norm)
