"""From the sums over ranks to what an update does with its gradients.

    sums        loss total, count, count · normaliser, squares of the gradients of total / normaliser, a flag
                for each problem
    mean        gradients · normaliser / count
    clipped     · min(1, clip / norm of the mean)

A loss scale of fp16 is part of the normaliser. Where losses are scaled, squares that are not finite are an
overflow. (Those of finite gradients are: 65,504 squared is far below the 3e38 of float32.)

In any precision, a step whose loss or squares are not finite may be one to leave out (`skips`). Of fp16 that
is one whose loss is not finite, which no other loss scale would help: an overflow of gradients alone is not.

On the host these are plain numbers, on a device 0-dim tensors, which nobody reads. Both compute the same.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.parallel.data import clip_factor

Number = float | Tensor


class Scaling(NamedTuple):
    """`factor` of the gradients; `norm` of the mean's, before clipping.

    `refused`: there are no samples, or there is a problem. `overflows`: gradients are not finite, though
    losses are scaled. `left_out`: the step is not finite, and such steps are left out. In all three cases no
    weight changes.
    """

    factor: Number
    refused: bool | Tensor
    overflows: bool | Tensor
    norm: Number
    left_out: bool | Tensor = False

    @property
    def skip(self) -> bool | Tensor:
        return self.refused | self.overflows | self.left_out


def scale_on_host(
    sums: Sequence[float], clip: float | None, *, scaled: bool = False, skips: bool = False
) -> Scaling:
    """`scaled`: losses have a loss scale. `skips`: a step that is not finite is left out."""
    total, count, weighted, square, *flags = sums
    refused = count == 0 or any(flags)
    overflows = scaled and not refused and not math.isfinite(square)
    measured = total + count if scaled else total + count + square
    left_out = skips and not refused and not math.isfinite(measured)
    mean = weighted / count / count if count else 0.0
    norm = mean * square**0.5
    return Scaling(mean * clip_factor(norm, clip), refused, overflows, norm, left_out)


def scale_on_device(
    sums: Tensor, clip: float | None, *, scaled: bool = False, skips: bool = False
) -> Scaling:
    total, count, weighted, square = sums[:4]
    is_empty = count == 0
    refused = is_empty | sums[4:].any()
    overflows = ~refused & ~square.isfinite() if scaled else torch.zeros_like(refused)
    measured = total + count if scaled else total + count + square
    left_out = ~refused & ~measured.isfinite() if skips else False
    mean = weighted / count / count
    norm = (mean * square.sqrt()).masked_fill(is_empty, 0.0)
    return Scaling(mean * clip_factor(norm, clip), refused, overflows, norm, left_out)
