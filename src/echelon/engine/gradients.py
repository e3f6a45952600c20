"""Gradients after they are summed over replicas: their norm, and scaling them in place."""

import torch
from torch import Tensor


def squared_norm(gradients: list[Tensor]) -> Tensor:
    """The sum of squares over all `gradients`, in at least float32."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
    return norms.square().sum()


def scale(gradients: list[Tensor], factor: float) -> None:
    """Multiply all `gradients` in place; a factor of one touches nothing."""
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def clip_factor(norm: float, limit: float | None) -> float:
    """What brings gradients of this norm down to `limit`: torch's rule, with its small constant."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
