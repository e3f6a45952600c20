"""From the sums over ranks to what an update does with its gradients.

    sums        loss total, count, count · normaliser, squares of the gradients of total / normaliser, a flag
                for each problem
    mean        gradients · normaliser / count
    clipped     · min(1, clip / norm of the mean)

On the host these are plain numbers, on a device 0-dim tensors, which nobody reads. Both compute the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from echelon.data_parallel import clip_factor

Number = float | Tensor


class Scaling(NamedTuple):
    """`factor` of the gradients; `norm` of the mean's, before clipping."""

    factor: Number
    skip: bool | Tensor
    norm: Number


def scale_on_host(sums: Sequence[float], clip: float | None) -> Scaling:
    _, count, scaled, square, *flags = sums
    skip = count == 0 or any(flags)
    mean = scaled / count / count if count else 0.0
    norm = mean * square**0.5
    return Scaling(mean * clip_factor(norm, clip), skip, norm)


def scale_on_device(sums: Tensor, clip: float | None) -> Scaling:
    _, count, scaled, square = sums[:4]
    is_empty = count == 0
    skip = is_empty | sums[4:].any()
    mean = scaled / count / count
    norm = (mean * square.sqrt()).masked_fill(is_empty, 0.0)
    return Scaling(mean * clip_factor(norm, clip), skip, norm)
