"""Gradients after they are summed over replicas: their norm, and how much to clip."""

import torch
from torch import Tensor


def squared_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The sum of squares over all `gradients`, on `device`."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    # A norm in bf16 would keep three digits of a sum of millions.
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    norms = torch._foreach_norm(values, dtype=wide)
    return torch.stack(norms).double().square().sum()


def clip_factor(norm: float, limit: float | None) -> float:
    """What brings gradients of this norm down to `limit`: torch's rule, with its small constant."""
    if limit is None or norm + 1e-6 <= limit:
        return 1.0
    return limit / (norm + 1e-6)  # not a number for such a norm, as torch does
