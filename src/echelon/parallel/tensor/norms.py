"""Norms over features that are split: ranks add up the sums that a norm needs, one number per position.

root mean square    y = w · x / √(Σx²/n + ε)
layer               y = w · (x − m) / √(Σ(x − m)²/n + ε) + b,  m = Σx/n
"""

from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.nn.huggingface.modules import rms_epsilon
from echelon.parallel.tensor.modules import SplitModule
from echelon.parallel.tensor.regions import Region


def is_norm(module: nn.Module) -> bool:
    """Whether it is a norm of the last dim, of a kind that is known here."""
    if type(module).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward):
        shape: Any = module.normalized_shape
        return len(shape) == 1
    return rms_epsilon(module) is not None


@final
class SplitNorm(SplitModule):
    """A norm over the features of all ranks, of which each has an equal part."""

    def __init__(self, module: Any, region: Region) -> None:
        super().__init__(module, region)
        self.subtracts_mean = isinstance(module, nn.LayerNorm)
        self.epsilon: float | None = rms_epsilon(module) or getattr(module, "eps", None)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        epsilon = torch.finfo(x.dtype).eps if self.epsilon is None else self.epsilon
        if self.subtracts_mean:
            wide = wide - self._mean(wide)
        normal = wide * torch.rsqrt(self._mean(wide * wide) + epsilon)
        weight, bias = getattr(self.module, "weight", None), getattr(self.module, "bias", None)
        normal = normal if weight is None else normal * weight
        return (normal if bias is None else normal + bias).to(x.dtype)

    def _mean(self, values: Tensor) -> Tensor:
        features = values.shape[-1] * self.region.group.size
        return self.region.total(values.sum(-1, keepdim=True)) / features
