"""Whether two computations of the same numbers differ by more than rounding."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from echelon.huggingface import casts_to_float32

_AT_ONCE = 1 << 22  # elements that are compared at a time
_TF32 = 2.0**-10  # to which matrices of float32 may be multiplied on a CUDA device


class Difference(NamedTuple):
    """Of one tensor: the norm of what differs, and of what it should be."""

    name: str
    distance: float
    size: float

    @property
    def relative(self) -> float:
        return self.distance / self.size if self.size else float("inf") if self.distance else 0.0


def compare(name: str, actual: Tensor, expected: Tensor) -> Difference:
    """Where both are infinite alike, or not a number, they are the same."""
    squares = torch.zeros(2, dtype=torch.float64, device=expected.device)
    for one, other in zip(_portions(actual), _portions(expected), strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        apart = (one - other).masked_fill(same, 0.0).nan_to_num(torch.inf, torch.inf)
        size = other.nan_to_num(0.0, 0.0, 0.0)
        squares += torch.stack([apart.square().sum(), size.square().sum()])
    distance, size = squares.sqrt().tolist()
    return Difference(name, distance, size)


def _portions(tensor: Tensor) -> Iterator[Tensor]:
    """All numbers in float64, a few at a time: logits may take gigabytes."""
    flat = tensor.detach().flatten()
    real = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    return (part.double() for part in real.split(_AT_ONCE))


def tolerance_of(tensor: Tensor) -> float:
    """The relative difference that rounding may make in values of this type."""
    eps = torch.finfo(tensor.dtype).eps
    if tensor.is_cuda and tensor.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        eps = _TF32
    return float(eps**0.5)


def tolerance_inside(modules: Sequence[nn.Module]) -> float:
    """What rounding may make in modules that compute in float32 whatever the type of their weights; of the
    same norm, split, all numbers are of that type."""
    casts = any(casts_to_float32(inside) for module in modules for inside in module.modules())
    return torch.finfo(torch.float32).eps ** 0.5 if casts else 0.0


def beyond_rounding(differences: list[Difference], tolerance: float) -> list[Difference]:
    """Those that are no rounding. What is nothing but rounding may be anything up to that of the largest."""
    largest = max((each.size for each in differences), default=0.0)
    return [
        each for each in differences if each.distance > tolerance * (each.size + 10 * tolerance * largest)
    ]
