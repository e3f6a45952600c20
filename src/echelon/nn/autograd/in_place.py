"""Tensors that code may change in place: neither leaves nor views, which autograd makes exceptions for."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _Enter(torch.autograd.Function):
    """Keeps the memory, as no leaf and no view: autograd makes exceptions for those (in hooks, in the order
    of its work), and forbids to change them in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # where none comes, there is none
        memory = leaf.new_empty(0)
        return memory.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

    @staticmethod
    def backward(_: FunctionCtx, *gradients: Any) -> Any:
        return gradients[0]


def enter(leaf: Tensor) -> Tensor:
    """Return a received tensor as layers see it, at the start of a graph with a backward pass of its own."""
    function: Callable[[Tensor], Tensor] = _Enter.apply
    return function(leaf) if leaf.requires_grad else leaf


def product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Compute F.linear whose result is never a view: that of a custom function is not changed in place."""
    flat = F.linear(x.flatten(0, -2), matrix, bias)
    shaped: Tensor = torch.ops.aten._unsafe_view(flat, (*x.shape[:-1], flat.shape[-1]))
    return shaped
