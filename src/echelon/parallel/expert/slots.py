"""Rows of slots, sorted by expert, and back: as `experts.sorting`, with gradients and no dropped slots.

The rows that leave are those of the first slots in sorted order; dropped slots lie behind them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.nn.experts.sorting import Slots, gather_rows, sort_weights, sum_slots


def counts_of(slots: Slots) -> Tensor:
    """How many slots each expert has."""
    return slots.ends.long().diff(prepend=slots.ends.new_zeros(1))


def take_rows(hidden_states: Tensor, slots: Slots, number: int) -> Tensor:
    """The token of each of the first `number` slots, as rows."""
    rows: Tensor = _TakeRows.apply(hidden_states, slots, number)  # type: ignore[no-untyped-call]
    return rows


def mix_rows(rows: Tensor, weights: Tensor, slots: Slots) -> Tensor:
    """The sum over the slots of each token, of the rows of the first slots, weighted by `weights`
    [tokens, k]."""
    mixed: Tensor = _MixRows.apply(rows, weights, slots)  # type: ignore[no-untyped-call]
    return mixed


def inverse_of(order: Tensor) -> Tensor:
    """Where each row goes."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Rows in this order."""
    permuted: Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, slots: Slots, number: int) -> Tensor:
        ctx.slots = slots
        return gather_rows(hidden_states.contiguous(), _first(slots, number))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return sum_slots(_padded(gradient, ctx.slots), ctx.slots), None, None


class _MixRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        ctx.save_for_backward(rows, weights)
        weighted = rows * sort_weights(weights, slots)[: len(rows), None]
        return sum_slots(_padded(weighted, slots), slots).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        slots: Slots = ctx.slots
        rows, weights = ctx.saved_tensors
        of_slots = gather_rows(gradient.contiguous(), _first(slots, len(rows)))
        for_weights = None
        if ctx.needs_input_grad[1]:
            products = _padded((of_slots * rows).sum(1, keepdim=True), slots)
            for_weights = products[slots.inverse, 0].to(weights.dtype)
        weighted = of_slots * sort_weights(weights, slots)[: len(rows), None]
        return weighted.to(rows.dtype), for_weights, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


def _padded(rows: Tensor, slots: Slots) -> Tensor:
    """Rows of all slots; those of dropped ones are zeros."""
    missing = slots.inverse.numel() - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


def _first(slots: Slots, number: int) -> Slots:
    """The first of them, in sorted order."""
    return slots._replace(order=slots.order[:number])
