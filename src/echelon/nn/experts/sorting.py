"""Slots sorted by expert, so that the rows of one expert lie together.

    indices     token 0: [2, 0]   token 1: [0, 1]        slots 0 1 | 2 3
    order       1 2 | 3 | 0                              slots sorted by expert, stable
    ends        2     3   4                              of the rows of each expert; dropped slots lie behind
    inverse     token 0: [3, 0]   token 1: [1, 2]        the row of each slot

All of it stays on the device. The slots of a token are summed in their order, so a sum is the same in every
run. Nothing here has a gradient but `sort_weights`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.nn.experts.backend import kernels_for, sum_dtype


class Slots(NamedTuple):
    """`order` [slots], int64; `inverse` [tokens, k], int64; `ends` [experts], int32."""

    order: Tensor
    inverse: Tensor
    ends: Tensor


@torch.no_grad()
def sort_slots(indices: Tensor, num_experts: int) -> Slots:
    """Sort the slots of `indices` [tokens, k]; an index of `num_experts` is a dropped slot."""
    experts, order = indices.flatten().to(torch.int32).sort(stable=True)
    numbers = torch.arange(num_experts, dtype=torch.int32, device=indices.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Slots(order, inverse.view(indices.shape), ends)


def ends_of(counts: Tensor) -> Tensor:
    """Where the rows of each expert end, if each has so many."""
    return counts.cumsum(0).to(torch.int32)


def gather_rows(x: Tensor, slots: Slots) -> Tensor:
    """The row of the token of each slot [slots, width], sorted."""
    kernels, k = kernels_for(x), slots.inverse.shape[1]
    if kernels is not None:
        return kernels.gather_rows(x, slots.order, k)  # type: ignore[no-any-return]
    return x.index_select(0, slots.order // k)


def sum_slots(rows: Tensor, slots: Slots) -> Tensor:
    """The sum over the slots of each token [tokens, width], of sorted rows."""
    kernels = kernels_for(rows)
    if kernels is not None:
        return kernels.sum_slots(rows, slots.inverse)  # type: ignore[no-any-return]
    tokens, width = len(slots.inverse), rows.shape[1]
    total = torch.zeros(tokens, width, dtype=sum_dtype(rows.dtype), device=rows.device)
    for places in slots.inverse.unbind(1):
        total += rows.index_select(0, places)
    return total.to(rows.dtype)


def sort_weights(weights: Tensor, slots: Slots) -> Tensor:
    """The weight of each sorted row [slots], of `weights` [tokens, k]."""
    function: Any = _SortWeights.apply
    ordered: Tensor = function(weights, slots.order, slots.inverse)
    return ordered


class _SortWeights(torch.autograd.Function):
    """A permutation, whose backward pass is another; torch's own would add up with atomics."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return weights.flatten().index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _, inverse = ctx.saved_tensors
        return gradient.index_select(0, inverse.flatten()).view(inverse.shape), None, None
