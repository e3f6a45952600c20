"""Stochastic rounding of float32 to bf16: up or down at random, so that the mean is the value itself.

A bf16 number is the upper half of a float32. To add 16 random bits to the lower half, and to cut it off,
rounds up with the probability that makes the mean exact:

    float32   0 10000000 1001001|0000111111011011      the lower half is 0.06 of the step to the next bf16
    noise                        1111010010110010      carries into the upper half in 6 % of all draws

What bf16 can hold stays as it is, and so do infinities and what is not a number. The noise of an element is a
hash of a key and of its index in the whole parameter (hashing.py): it does not depend on the plan. Each hash
serves four neighbouring elements. `rounding_kernel` computes the same in one pass on a CUDA device.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.nn.hashing import WEYL, hash_of, mix_, signed
from echelon.update.precision.element_runs import ElementRuns

_PER_WORD = 4  # elements per hash
_QUIET_NAN = (
    0x00400000  # the highest bit of the fraction: what is not a number stays so without its lower half
)
_CPU_TILE, _GPU_TILE = 1 << 16, 1 << 22  # elements at a time, which bounds the memory beside the result


class Placement(NamedTuple):
    """What the noise of a tensor depends on, beside seed and update: its parameter, and its elements."""

    name: int  # a hash
    runs: Sequence[ElementRuns]

    @classmethod
    def of(cls, name: str, runs: Sequence[ElementRuns]) -> "Placement":
        return cls(hash_of(*name.encode()), runs)


@final
class KeyedRounding:
    """Rounds weights after each update, with noise that seed, update, parameter and element decide."""

    def __init__(self, seed: int) -> None:
        self._seed, self._num_updates = seed, 0

    def start_update(self, number: int) -> None:
        """Counted from 0 by the engine: how often somebody has asked may depend on the plan."""
        self._num_updates = number + 1

    def round(self, weight: Tensor, value: Tensor, placement: Placement) -> None:
        """weight (bf16) = value (float32), rounded."""
        key = hash_of(self._seed, self._num_updates, placement.name)
        round_stochastically(weight, value, key, placement.runs)


@torch.no_grad()
def round_stochastically(weight: Tensor, value: Tensor, key: int, runs: Sequence[ElementRuns]) -> None:
    """weight (bf16) = value (float32), rounded. `runs`: where the elements lie in the whole parameter; those
    that are in none (padding) are rounded to the nearest."""
    source = value.reshape(-1)  # a copy, if it lies in another order
    target = weight.view(-1) if weight.is_contiguous() else torch.empty_like(source, dtype=weight.dtype)
    if sum(len(each.in_part) * each.length for each in runs) < len(source):
        target.copy_(source)
    for each in runs:
        if has_kernel(source):
            from echelon.update.precision.rounding_kernel import round_runs

            round_runs(target, source, key, each)
        else:
            _round(target, source, key, each)
    if not weight.is_contiguous():
        weight.copy_(target.view(weight.shape))


def _round(target: Tensor, source: Tensor, key: int, runs: ElementRuns) -> None:
    for tile in _tiles(runs, source.device):
        places = tile.in_part[:, None] + torch.arange(tile.length, device=source.device)
        target[places] = round_with(source[places], _noise(key, tile))


def round_with(values: Tensor, noise: Tensor) -> Tensor:
    """float32 as bf16, given 16 random bits for each element."""
    bits = values.view(torch.int32)
    rounded = torch.where(values.isnan(), bits | _QUIET_NAN, bits + noise) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16)


def _noise(key: int, runs: ElementRuns) -> Tensor:
    """16 random bits for each element of some runs, [runs, length]."""
    device = runs.in_whole.device
    num_words = -(-(runs.length + _PER_WORD - 1) // _PER_WORD)  # the first may begin before the run
    words = (runs.in_whole // _PER_WORD)[:, None] + torch.arange(num_words, device=device)
    hashes = mix_(words.mul_(signed(WEYL)).add_(signed(key)))
    elements = (runs.in_whole % _PER_WORD)[:, None] + torch.arange(runs.length, device=device)
    return hashes.view(torch.int16).gather(1, elements).int().bitwise_and_(0xFFFF)


def _tiles(runs: ElementRuns, device: torch.device) -> Iterator[ElementRuns]:
    """Parts of some whole runs, or of one if it is long."""
    tile = _CPU_TILE if device.type == "cpu" else _GPU_TILE
    for begin in range(0, runs.length, tile):
        length = min(tile, runs.length - begin)
        rows = max(1, tile // length)
        for top in range(0, len(runs.in_part), rows):
            chosen = slice(top, top + rows)
            yield ElementRuns(runs.in_part[chosen] + begin, runs.in_whole[chosen] + begin, length)


def has_kernel(tensor: Tensor) -> bool:
    """Whether Triton has kernels for it."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()
