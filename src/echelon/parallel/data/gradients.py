"""Gradients after they are summed over replicas: their norm, and how much to clip."""

import torch
from torch import Tensor


def squared_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The sum of squares over all `gradients`, on `device`."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    values = [torch.view_as_real(each) if each.is_complex() else each for each in values]
    if all(_is_plain(each) for each in values):
        flat = [each.view(-1) for each in values]
        return torch.stack([torch.dot(each, each) for each in flat]).double().sum()
    # A norm in bf16 would keep three digits of a sum of millions.
    norms = torch._foreach_norm(values, dtype=torch.promote_types(values[0].dtype, torch.float32))
    return torch.stack(norms).double().square().sum()


def _is_plain(gradient: Tensor) -> bool:
    """Whether a product with itself does: on a CPU that takes half of a norm's time, and rounds less."""
    wide = gradient.dtype in (torch.float32, torch.float64)
    return wide and gradient.is_cpu and gradient.is_contiguous()


def clip_factor(norm: float | Tensor, limit: float | None) -> float | Tensor:
    """What brings gradients of this norm down to `limit`: torch's rule, with its small constant.

    It stays where the norm is. Not a number for such a norm, as torch does.
    """
    if limit is None:
        return 1.0
    if isinstance(norm, Tensor):
        return (limit / (norm + 1e-6)).clamp(max=1.0)
    return 1.0 if norm + 1e-6 <= limit else limit / (norm + 1e-6)
