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
_AT_ONCE = 1 << 22  # numbers that are compared at once
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
    """The samples that differ. Each is measured by itself: a large one would hide others."""
    rows, other_rows = (_by_sample(tensor, dim, part.end - part.begin) for tensor in (one, other))
    found = []
    at_once = max(1, _AT_ONCE // max(1, rows.shape[1]))
    for begin in range(0, len(rows), at_once):
        apart, scale = _distances(rows[begin : begin + at_once], other_rows[begin : begin + at_once])
        size = apart.square().mean(1).sqrt()
        for place in ((size > tolerance * scale) & (size > 0)).nonzero().flatten().tolist():
            worst, number = int(apart[place].argmax()), begin + place
            found.append(
                Difference(
                    float(size[place] / scale[place]) if scale[place] else math.inf,
                    float((apart[place] > tolerance * scale[place]).double().mean()),
                    part.begin + number,
                    float(rows[number, worst]),
                    float(other_rows[number, worst]),
                    tolerance,
                )
            )
    return found


def _by_sample(tensor: Tensor, dim: int, samples: int) -> Tensor:
    """[samples, numbers of each]."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    each = plain.shape[dim] // samples
    rows: Tensor = plain.detach().unflatten(dim, (samples, each)).movedim(dim, 0).reshape(samples, -1)
    return rows


def _distances(rows: Tensor, other_rows: Tensor) -> tuple[Tensor, Tensor]:
    """How far numbers are apart, and the root mean square of each row. Equal ones may be no numbers."""
    one, other = rows.double(), other_rows.double()
    is_same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(is_same, torch.zeros_like(one), one - other).abs().nan_to_num(math.inf, math.inf)
    finite = torch.where(one.isfinite(), one, torch.zeros_like(one))
    return apart, finite.square().mean(1).sqrt().nan_to_num(0.0)


def rounding(dtype: torch.dtype) -> float:
    """The relative difference that rounding explains: the root of the type's own, as errors add up."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return max(_LEAST, math.sqrt(torch.finfo(dtype).eps))


def map_tensors(function: Callable[[Tensor], Tensor], structure: Any) -> Any:
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, structure)


def _tensors(structure: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]


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
