"""Where a part of a model begins that has a backward pass of its own: its inputs as the layers see them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _Enter(torch.autograd.Function):
    """The same memory as no leaf and no view: autograd makes exceptions for those (in hooks, in the order of
    its work), and forbids to change them in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # where none comes, there is none
        memory = leaf.new_empty(0)
        return memory.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride())

    @staticmethod
    def backward(_: FunctionCtx, *gradients: Any) -> Any:
        return gradients[0]


def enter(leaf: Tensor) -> Tensor:
    """What layers see of a tensor that has come in."""
    see: Callable[[Tensor], Tensor] = _Enter.apply
    return see(leaf) if leaf.requires_grad else leaf
