"""The product of a gate: logits in float32 at least, of tokens in any type.

On a CUDA device, tokens and weights of 16 bits are multiplied as they are, and their products added up in
float32: that is the product of what they would be in float32, without copies of the tokens in that type.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.errors import UserError
from echelon.nn.experts.positions import router_dtype


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x·Wᵀ in the type of gates, also inside of autocast."""
    if x.shape[-1] != weight.shape[1]:
        raise UserError(
            f"the gate was made for width={weight.shape[1]}, and its tokens {list(x.shape)} are "
            f"{x.shape[-1]} wide: make the gate with width={x.shape[-1]}"
        )
    dtype = router_dtype(x)
    with _without_autocast(x.device.type):
        if x.is_cuda and x.dtype == weight.dtype != dtype and x.numel():
            function: Any = _Product.apply
            logits: Tensor = function(x.flatten(0, -2), weight)
            return logits.view(*x.shape[:-1], len(weight))
        return F.linear(x.to(dtype), weight.to(dtype))


def _without_autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast(device, enabled=False) if device in ("cpu", "cuda") else nullcontext()


class _Product(torch.autograd.Function):
    """Of 16 bits, to float32. Its gradient is rounded to 16 bits, as those of all matrices of that type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradient.to(x.dtype)
        needs_x, needs_weight = ctx.needs_input_grad
        return gradient @ weight if needs_x else None, gradient.t() @ x if needs_weight else None


def _multiply(x: Tensor, matrix: Tensor) -> Tensor:
    if x.is_cuda:
        return torch.mm(x, matrix, out_dtype=torch.float32)
    return x.float() @ matrix.float()
