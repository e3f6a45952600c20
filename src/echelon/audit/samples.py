"""Whether a model computes each sample by itself: the output of some samples together against that of parts.

    whole      ■ ■ ■ ■  ──►  0.3  0.1  0.7  0.2
    parts      ■ ■      ──►  0.3  0.1                 the same, or the model mixes samples
                   ■ ■  ──►            0.7  0.2

Rounding differs with the number of samples. Where a difference is small, the same samples are asked once more
at the same place among as many, but beside other samples: then only a model that mixes them changes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_LEAST = 1e-5  # relative; models compute in float32 inside, whatever their type
_SMALL = 0.05  # relative differences that rounding may make in bf16, or of a few elements


class Part(NamedTuple):
    """Samples begin…end of some samples, and what the model returns for them alone."""

    begin: int
    end: int
    output: Any


class Difference(NamedTuple):
    """By how much outputs differ, relative to their size, and the two numbers that differ most."""

    size: float
    fraction: float  # of all elements, those that differ by more than rounding
    sample: int
    one: float
    other: float
    tolerance: float

    @property
    def is_small(self) -> bool:
        """Whether it may be rounding, which other samples beside the same ones can tell."""
        return self.size <= _SMALL or self.fraction <= 2 * _SMALL


def sample_dims(whole: Any, part: Any, samples: int, count: int) -> list[int | None]:
    """For each tensor of an output: the dim that counts samples, `count` of `samples` in `part`.

    sample_dims(empty(8, 4, 3), empty(8, 2, 3), samples=4, count=2) == [1]
    """
    pairs = zip(_tensors(whole), _tensors(part), strict=True)
    return [_sample_dim(one.shape, other.shape, samples, count) for one, other in pairs]


def _sample_dim(whole: Sequence[int], part: Sequence[int], samples: int, count: int) -> int | None:
    if len(whole) != len(part):
        return None
    different = [dim for dim, (one, other) in enumerate(zip(whole, part, strict=True)) if one != other]
    if len(different) != 1 or whole[different[0]] * count != part[different[0]] * samples:
        return None
    return different[0]


def select(structure: Any, dims: Sequence[int | None], begin: int, end: int, samples: int) -> Any:
    """Samples begin…end of an output of `samples`; tensors that count none stay whole."""
    remaining = iter(dims)

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        dim = next(remaining)
        if dim is None:
            return leaf
        each = leaf.shape[dim] // samples
        return leaf.narrow(dim, begin * each, (end - begin) * each)

    return tree_map(cut, structure)


def largest_difference(
    whole: Any, parts: Sequence[Part], dims: Sequence[int | None], samples: int, sharpness: float = 1.0
) -> Difference | None:
    """Where outputs of parts differ most from those of all samples, if by more than rounding; `sharpness`
    is the part of its usual tolerance."""
    found: list[Difference] = []
    for part in parts:
        expected = select(whole, dims, part.begin, part.end, samples)
        for dim, one, other in zip(dims, _tensors(expected), _tensors(part.output), strict=True):
            if dim is not None:
                found += _compare(one, other, dim, part, rounding(one.dtype) * sharpness)
    return max(found, key=lambda difference: difference.size, default=None)


def _compare(one: Tensor, other: Tensor, dim: int, part: Part, tolerance: float) -> list[Difference]:
    """Of each sample by itself: a large one would hide others."""
    each = one.shape[dim] // (part.end - part.begin)
    found = []
    for number in range(part.begin, part.end):
        place = (number - part.begin) * each
        row, other_row = (_numbers(tensor.narrow(dim, place, each)) for tensor in (one, other))
        difference = _of_sample(row, other_row, number, tolerance)
        if difference is not None:
            found.append(difference)
    return found


def _of_sample(one: Tensor, other: Tensor, sample: int, tolerance: float) -> Difference | None:
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, torch.zeros_like(one), one - other).abs().nan_to_num(math.inf, math.inf)
    finite = torch.where(one.isfinite(), one, torch.zeros_like(one))
    scale = finite.square().mean().sqrt().item() if len(one) else 0.0
    size = apart.square().mean().sqrt().item() if len(one) else 0.0
    if size <= tolerance * scale or size == 0.0:
        return None
    worst = int(apart.argmax())
    fraction = float((apart > tolerance * scale).double().mean())
    relative = size / scale if scale else math.inf
    return Difference(relative, fraction, sample, one[worst].item(), other[worst].item(), tolerance)


def rounding(dtype: torch.dtype) -> float:
    """The relative difference that rounding explains: the root of the type's own, as errors add up."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return max(_LEAST, math.sqrt(torch.finfo(dtype).eps))


def map_tensors(function: Callable[[Tensor], Tensor], structure: Any) -> Any:
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, structure)


def _tensors(structure: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]


def _numbers(tensor: Tensor) -> Tensor:
    dense = tensor.detach()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).flatten().double()


def mixing_message(difference: Difference, samples: int, count: int, plan: str) -> str:
    """What users read of a model that mixes samples."""
    return (
        f"plan '{plan}' cuts the batch, and the model mixes samples: sample {difference.sample} of the first "
        f"microbatch has an output of {difference.one:.6g} among {samples} samples, and of "
        f"{difference.other:.6g} among {count}; {_how_much(difference)}. So training would depend on how the "
        "batch is cut. Likely a forward takes a mean, norm, softmax, sort or shuffle over dim 0; compute "
        "each sample by itself (or normalise with nn.BatchNorm, whose rule docs/audit.md gives), use "
        "microbatches=1 data=1, or audit='off' if it is meant"
    )


def carrying_message(difference: Difference, samples: int, count: int, plan: str) -> str:
    """What users read of a model whose forwards change what the next one computes."""
    del samples, count
    return (
        f"plan '{plan}' calls the model once for each microbatch, and each call changes a buffer that the "
        f"next one computes with: sample {difference.sample} of the first microbatch has an output of "
        f"{difference.one:.6g} before, and of {difference.other:.6g} after such a change; "
        f"{_how_much(difference)}. On one device a step calls it once. Likely a power iteration "
        "(spectral_norm), or running statistics that are used in training; use microbatches=1, change it "
        "once per step outside of the forward, or audit='off' if it is meant"
    )


def _how_much(difference: Difference) -> str:
    return (
        f"they differ by {difference.size:.2g} of their size, where rounding explains "
        f"{difference.tolerance:.1g}"
    )
