"""From the sums over ranks to what an update does with its gradients.

    sums        loss total, count, squares of the gradients of total / normaliser, a flag for each problem
    mean        gradients · normaliser / count
    clipped     · min(1, clip / norm of the mean)

On the host these are plain numbers, on a device 0-dim tensors, which nobody reads. Both compute the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.data_parallel import clip_factor

Number = float | Tensor


class Scaling(NamedTuple):
    """`factor` of the gradients; `norm` of the mean's, before clipping; `normaliser` of the next losses."""

    factor: Number
    skip: bool | Tensor
    norm: Number
    normaliser: Number


def scale_on_host(sums: Sequence[float], normaliser: Number, clip: float | None) -> Scaling:
    _, count, square, *flags = sums
    skip = count == 0 or any(flags)
    mean = normaliser / count if count else 0.0
    norm = mean * square**0.5
    return Scaling(mean * clip_factor(norm, clip), skip, norm, normaliser if skip else count)


def scale_on_device(sums: Tensor, normaliser: Number, clip: float | None) -> Scaling:
    count, square, flags = sums[1], sums[2], sums[3:]
    is_empty = count == 0
    skip = is_empty | flags.any()
    mean = normaliser / count
    norm = (mean * square.sqrt()).masked_fill(is_empty, 0.0)
    return Scaling(mean * clip_factor(norm, clip), skip, norm, torch.where(skip, normaliser, count))
