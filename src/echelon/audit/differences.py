"""Whether two computations of the same numbers differ by more than rounding."""

from typing import NamedTuple

import torch
from torch import Tensor

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
    one, other = actual.detach(), expected.detach()
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    distance = (one - other).masked_fill(same, 0.0).norm()
    size = other.nan_to_num(0.0, 0.0, 0.0).norm()
    return Difference(name, float(distance.nan_to_num(torch.inf)), float(size))


def tolerance_of(tensor: Tensor) -> float:
    """The relative difference that rounding may make in values of this type."""
    eps = torch.finfo(tensor.dtype).eps
    if tensor.is_cuda and tensor.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        eps = _TF32
    return float(eps**0.5)


def beyond_rounding(differences: list[Difference], tolerance: float) -> list[Difference]:
    """Those that are no rounding. What is nothing but rounding may be anything up to that of the largest."""
    largest = max((each.size for each in differences), default=0.0)
    return [
        each for each in differences if each.distance > tolerance * (each.size + 10 * tolerance * largest)
    ]
