"""Keyed dropout in one pass: nothing is kept for the backward pass but what decides the mask.

    forward     output = x · mask / (1 - p)
    backward    gradient of x = gradient · mask / (1 - p), with the mask computed again

A CUDA device with Triton has a kernel for it. Elsewhere a mask costs more to compute than to keep, and
`modules` multiplies by it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from echelon.nn.dropout.mask import Draw, mask_of

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def has_kernel(x: Tensor) -> bool:
    """Whether a kernel drops elements of `x` in one pass."""
    return x.is_cuda and x.dtype in _KERNEL_TYPES and _has_triton()


@cache
def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()


def drop(x: Tensor, draw: Draw, *, inplace: bool = False) -> Tensor:
    """x · mask / (1 - p), in the memory of `x` if `inplace`. Modes see it as one function of torch."""
    if has_torch_function_unary(x):
        overridden: Tensor = handle_torch_function(drop, (x,), x, draw, inplace=inplace)
        return overridden
    function: Any = _Drop.apply
    dropped: Tensor = function(x, draw, inplace)
    return dropped


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: Draw, inplace: bool) -> Tensor:
        ctx.draw = draw
        ctx.set_materialize_grads(False)
        if not inplace:
            return dropped(x, draw)
        ctx.mark_dirty(x)
        return drop_into(x, x, draw)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None if gradient is None else drop(gradient, ctx.draw), None, None


def dropped(x: Tensor, draw: Draw) -> Tensor:
    """x · mask / (1 - p), without a gradient, in new memory with the strides of `x`."""
    return drop_into(torch.empty_like(x), x, draw)


def drop_into(output: Tensor, x: Tensor, draw: Draw) -> Tensor:
    """`dropped`, in the memory of `output`, which may be that of `x`."""
    if x.numel() and has_kernel(x):
        from echelon.nn.dropout import kernel  # imports Triton

        if kernel.fits(x.shape, draw):
            return _by_kernel(kernel.drop_into, output, x.contiguous(), draw)
    return torch.mul(x, mask_of(draw, x.shape, x.device), out=output).mul_(draw.scale)


def _by_kernel(kernel: Callable[..., None], output: Tensor, x: Tensor, draw: Draw) -> Tensor:
    if output.is_contiguous():
        kernel(output, x, draw)
        return output
    contiguous = torch.empty_like(x)
    kernel(contiguous, x, draw)
    return output.copy_(contiguous)
