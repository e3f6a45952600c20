"""What lies between the two matrices of an expert, times the weight of a row; and its backward pass.

    swiglu    hidden = weight · silu(gate) · up,   of rows [gate, up]
    gelu      hidden = weight · gelu(row)
    none      hidden = weight · row

The backward pass takes the rows again, and keeps nothing else.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.nn.experts.backend import kernels_for

Function = Literal["swiglu", "gelu", "none"]
_aten = torch.ops.aten


class Gradients(NamedTuple):
    """`hidden` only where it was asked for; `weights` where there are any."""

    rows: Tensor
    weights: Tensor | None
    hidden: Tensor | None


def activate(rows: Tensor, weights: Tensor | None, function: Function) -> Tensor:
    """`hidden`. Without a gradient."""
    kernels = kernels_for(rows)
    if kernels is not None:
        return kernels.activate(rows, weights, function)  # type: ignore[no-any-return]
    hidden = _plain(rows, function)
    if weights is None:
        return hidden
    return hidden.mul_(weights[:, None]) if hidden is not rows else hidden * weights[:, None].to(rows.dtype)


def activation_gradients(
    gradient: Tensor, rows: Tensor, weights: Tensor | None, function: Function, *, with_hidden: bool
) -> Gradients:
    """Of `gradient`, that of `hidden`."""
    kernels = kernels_for(rows)
    if kernels is not None:
        return Gradients(*kernels.activation_gradients(gradient, rows, weights, function, with_hidden))
    hidden = _plain(rows, function)
    if weights is None:
        return Gradients(_backward(gradient, rows, function), None, hidden if with_hidden else None)
    for_weights = (gradient * hidden).sum(1).to(weights.dtype)
    scale = weights[:, None].to(rows.dtype)
    for_rows = _backward(gradient * scale, rows, function)
    return Gradients(for_rows, for_weights, hidden * scale if with_hidden else None)


def _plain(rows: Tensor, function: Function) -> Tensor:
    if function == "none":
        return rows
    if function == "gelu":
        return F.gelu(rows)
    gate, up = rows.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _backward(gradient: Tensor, rows: Tensor, function: Function) -> Tensor:
    if function == "none":
        return gradient
    if function == "gelu":
        for_rows: Tensor = _aten.gelu_backward(gradient, rows)
        return for_rows
    both = torch.empty_like(rows)
    (gate, up), (for_gate, for_up) = rows.chunk(2, dim=-1), both.chunk(2, dim=-1)
    for_gate.copy_(_aten.silu_backward(gradient * up, gate))
    torch.mul(gradient, F.silu(gate), out=for_up)
    return both
