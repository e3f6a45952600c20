"""Experts computed over sorted rows: two products, of which autograd keeps as little as it can.

    x ── gather ── · first ──┬── activation · weight ── · down ── sum of slots ── output
                             └ kept, with x and the order of slots

    swiglu    hidden = weight · silu(gate) · up,   of rows [gate, up]
    gelu      hidden = weight · gelu(row)
    none      hidden = weight · row

The gather and the activation run again in the backward pass. A row's weight is multiplied into the hidden
values and not into the output: so the output of single slots is needed for no gradient.

A backward pass that asks for gradients of rows only, or of matrices only, computes only those.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.nn.experts.rows import (
    Slots,
    ends_of,
    gather_rows,
    kernels_for,
    multiply,
    outer,
    sort_slots,
    sort_weights,
    sum_slots,
)
from echelon.nn.tracing import untraced

Function = Literal["swiglu", "gelu", "none"]
Activation = Function | Callable[[Tensor], Tensor]


def routed_experts(
    x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """Return the weighted sum over the experts of each token of x [tokens, width]; see `grouped_experts`.

    `indices`, `weights` [tokens, k]; an index equal to the number of experts is a dropped slot.
    """
    route = _route_untraced if torch.compiler.is_compiling() else _route
    return route(x, indices, weights, first, down, activation)


def grouped_experts(
    rows: Tensor,
    counts: Tensor,
    first: Tensor,
    down: Tensor,
    activation: Activation,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute rows [rows, width], sorted by expert, each by its own: activation(row · firstᵀ) · downᵀ.

    `counts` [experts]: the rows of each expert, on the device; rows behind them give 0. `first` [experts, n,
    width], `down` [experts, width, hidden]. `activation`: "swiglu" and "gelu" are fast; any function is
    applied to the first half of row · firstᵀ, the gate, and multiplied by the other. `weights` [rows]: of
    each row.
    """
    compute = _compute_untraced if torch.compiler.is_compiling() else _compute
    return compute(rows, ends_of(counts), first, down, activation, weights, None)


def _route(
    x: Tensor, indices: Tensor, weights: Tensor, first: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    slots = sort_slots(indices, len(first))
    return _compute(x, slots.ends, first, down, activation, sort_weights(weights, slots), slots)


def _compute(
    x: Tensor,
    ends: Tensor,
    first: Tensor,
    down: Tensor,
    activation: Activation,
    weights: Tensor | None,
    slots: Slots | None,
) -> Tensor:
    x, first, down = _autocast(x, first, down)
    functions: tuple[Any, Any] = (_First.apply, _Down.apply)
    weights = None if weights is None else weights.contiguous()
    rows: Tensor = functions[0](x.contiguous(), first, slots, ends)
    if callable(activation):
        gate, up = rows.chunk(2, dim=-1)
        rows, activation = activation(gate) * up, "none"
    output: Tensor = functions[1](rows, down, weights, slots, ends, activation)
    return output


_route_untraced, _compute_untraced = untraced(_route), untraced(_compute)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast would cast the inputs of a product."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


class _First(torch.autograd.Function):
    """gather(x) · firstᵀ; without slots, x is sorted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrices: Tensor, slots: Slots | None, ends: Tensor) -> Tensor:
        _save(ctx, slots, ends, x, matrices)
        rows = x if slots is None else gather_rows(x, slots)
        return multiply(rows, matrices.transpose(1, 2), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        slots, ends, (x, matrices) = _saved(ctx)
        for_x, for_matrices = (_is_asked_for(ctx, place) for place in range(2))
        gradient = gradient.contiguous()
        x_gradient = matrices_gradient = None
        if for_matrices:
            rows = x if slots is None else gather_rows(x, slots)
            matrices_gradient = outer(gradient, rows, ends)
            del rows  # before there are others of its size
        if for_x:
            x_gradient = multiply(gradient, matrices, ends)
            x_gradient = x_gradient if slots is None else sum_slots(x_gradient, slots)
        return x_gradient, matrices_gradient, None, None


class _Down(torch.autograd.Function):
    """activation(rows) · weights · downᵀ, and the sum over the slots of each token if there are slots."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        matrices: Tensor,
        weights: Tensor | None,
        slots: Slots | None,
        ends: Tensor,
        function: Function,
    ) -> Tensor:
        _save(ctx, slots, ends, rows, matrices, weights)
        ctx.function = function
        hidden = activate(rows, weights, function)
        output = multiply(hidden, matrices.transpose(1, 2), ends)
        return output if slots is None else sum_slots(output, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        slots, ends, (rows, matrices, weights) = _saved(ctx)
        for_rows, for_matrices, for_weights = (_is_asked_for(ctx, place) for place in range(3))
        gradient = gradient.contiguous() if slots is None else gather_rows(gradient.contiguous(), slots)
        rows_gradient = weights_gradient = hidden = matrices_gradient = None
        if for_rows or for_weights:
            hidden_gradient = multiply(gradient, matrices, ends)
            rows_gradient, weights_gradient, hidden = activation_gradients(
                hidden_gradient, rows, weights, ctx.function, with_hidden=for_matrices
            )
            del hidden_gradient  # before the largest of gradients is there
        elif for_matrices:
            hidden = activate(rows, weights, ctx.function)
        if hidden is not None:
            matrices_gradient = outer(gradient, hidden, ends)
        return rows_gradient, matrices_gradient, weights_gradient, None, None, None


def _save(ctx: Any, slots: Slots | None, ends: Tensor, *tensors: Tensor | None) -> None:
    ctx.has_slots = slots is not None
    ctx.save_for_backward(*tensors, *(slots or (ends,)))


def _saved(ctx: Any) -> tuple[Slots | None, Tensor, tuple[Any, ...]]:
    if not ctx.has_slots:
        *tensors, ends = ctx.saved_tensors
        return None, ends, tuple(tensors)
    *tensors, order, inverse, ends = ctx.saved_tensors
    return Slots(order, inverse, ends), ends, tuple(tensors)


def _is_asked_for(ctx: Any, place: int) -> bool:
    """Return True if this backward pass wants the gradient of the argument in this place.

    A pass that is split walks to the inputs first, and to the weights later.
    """
    if not ctx.needs_input_grad[place]:
        return False
    # Autograd lists nodes for tensors alone: all arguments before this one must be tensors.
    node = ctx.next_functions[place][0]
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # of a gradient that is given to the caller of the pass
        return True


# Between the two matrices of an expert: the activation times the weight of a row, and its backward pass.

_aten = torch.ops.aten


class Gradients(NamedTuple):
    """Gradients of rows and their weights, where there are any; and `hidden`, where it was asked for."""

    rows: Tensor
    weights: Tensor | None
    hidden: Tensor | None


def activate(rows: Tensor, weights: Tensor | None, function: Function) -> Tensor:
    """Compute `hidden` of rows. Without a gradient."""
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
    """Compute the gradients of rows and weights from `gradient`, that of `hidden`."""
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
