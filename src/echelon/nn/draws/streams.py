"""The numbers of one draw: a hash of each element's place in the tensor that one device would draw.

    one device     4 samples of 3 elements     0 1 2 │ 3 4 5 │ 6 7 8 │ 9 10 11
    a microbatch   samples 2 and 3                             6 7 8 │ 9 10 11

What does not belong to samples is the same in every microbatch: places begin at 0.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.nn.hashing import WEYL, mix_, signed

_MOST_HASHES = 1 << 22  # computed at a time: bounds the memory beside the result


class SampleDim(NamedTuple):
    """Which dim of a tensor counts samples, the first of which has this number in the global batch.

    The dim may have several rows of each sample, those of a sample one after the other.
    """

    dim: int
    samples: int
    first_sample: int | Tensor


@torch.no_grad()
def uniform(
    key: int, shape: tuple[int, ...], device: torch.device, sample_dim: SampleDim | None = None
) -> Tensor:
    """Numbers of (0, 1) in float64: odd multiples of 2⁻⁵³."""
    if sample_dim is None:
        return _uniform(key, prod(shape), 0, device).view(shape)
    dim, samples, first = sample_dim
    numbers = _uniform(key, prod(shape), first * (prod(shape) // samples), device)
    return numbers.view(shape[dim], *shape[:dim], *shape[dim + 1 :]).movedim(0, dim)


def _uniform(key: int, number: int, begin: int | Tensor, device: torch.device) -> Tensor:
    drawn = torch.empty(number, dtype=torch.float64, device=device)
    if isinstance(begin, Tensor):  # on the device of the replicas, where a model may draw on the host
        begin = begin.to(device)
    for left in range(0, number, _MOST_HASHES):
        part = drawn[left : left + _MOST_HASHES]
        places = torch.arange(left, left + len(part), device=device).add_(begin)
        hashes = mix_(places.mul_(signed(WEYL)).add_(signed(key)))
        part.copy_((hashes >> 12).bitwise_and_((1 << 52) - 1)).add_(0.5).mul_(2.0**-52)
    return drawn
