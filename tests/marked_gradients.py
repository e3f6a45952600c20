"""Gradients that a test makes wrong where it has marked them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _ChangedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, marked: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(marked)
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (marked,) = ctx.saved_tensors
        return torch.where(marked, ctx.change(gradient), gradient), None, None


def _changed(x: Tensor, marked: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    function: Any = _ChangedGradient
    result: Tensor = function.apply(x, marked, change)
    return result


def explode(x: Tensor, marked: Tensor) -> Tensor:
    """The same; its gradient is infinite where `marked`."""
    return _changed(x, marked, lambda gradient: torch.full_like(gradient, torch.inf))


def overflow(x: Tensor, marked: Tensor) -> Tensor:
    """The same; its gradient is far more than fp16 holds where `marked`."""
    return _changed(x, marked, lambda gradient: gradient * 1e9)
