"""Rows of tokens sorted by expert: how they are sorted, gathered, multiplied and added up again.

    indices     token 0: [2, 0]   token 1: [0, 1]        slots 0 1 | 2 3
    order       1 2 | 3 | 0                              slots sorted by expert, stable
    ends        2     3   4                              of the rows of each expert; dropped slots lie behind
    inverse     token 0: [3, 0]   token 1: [1, 2]        the row of each slot

    multiply    rows [rows, m] · matrices [experts, m, n]    each row by the matrix of its expert
    outer       left [rows, m]ᵀ · right [rows, n]            one product [m, n] for each expert, of its rows

Rows behind the last of `ends` belong to no expert: their product is 0. An expert without rows has an outer
product of 0. All of it stays on the device, but for products in float64 or without Triton. The slots of a
token are summed in their order, so a sum is the same in every run. Nothing here has a gradient but
`sort_weights`.
"""

from collections.abc import Collection, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.nn.triton_support import has_triton

_KERNEL_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def kernels_for(x: Tensor, types: Collection[torch.dtype] = _KERNEL_TYPES, module: str = "kernels") -> Any:
    """Return a module of kernels for `x`, or None: torch operations do the same."""
    if not x.is_cuda or x.dtype not in types or x.numel() == 0 or not has_triton():
        return None
    return import_module(f"echelon.nn.experts.{module}")  # which imports Triton


class Slots(NamedTuple):
    """Slots by expert: `order` [slots] and `inverse` [tokens, k], int64; `ends` [experts], int32."""

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
    """Return where the rows of each expert end, of the number of rows of each."""
    return counts.cumsum(0).to(torch.int32)


def gather_rows(x: Tensor, slots: Slots) -> Tensor:
    """Gather the row of the token of each slot [slots, width], sorted."""
    kernels = kernels_for(x)
    if kernels is not None:
        return kernels.gather_rows(x, slots.inverse, len(slots.order))  # type: ignore[no-any-return]
    return x.index_select(0, slots.order // slots.inverse.shape[1])


def sum_slots(rows: Tensor, slots: Slots) -> Tensor:
    """Sum sorted rows over the slots of each token [tokens, width]."""
    kernels = kernels_for(rows)
    if kernels is not None:
        return kernels.sum_slots(rows, slots.inverse)  # type: ignore[no-any-return]
    tokens, width = len(slots.inverse), rows.shape[1]
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(tokens, width, dtype=dtype, device=rows.device)
    for places in slots.inverse.unbind(1):
        total += rows.index_select(0, places)
    return total.to(rows.dtype)


def sort_weights(weights: Tensor, slots: Slots) -> Tensor:
    """Return the weight of each sorted row [slots], of `weights` [tokens, k]."""
    function: Any = _SortWeights.apply
    ordered: Tensor = function(weights, slots.order, slots.inverse)
    return ordered


class _SortWeights(torch.autograd.Function):
    """A permutation, whose backward pass is another; torch's own would add up with atomics."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return weights.flatten().index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse.flatten()).view(inverse.shape), None, None


# Products of sorted rows with the matrices of their experts.

_ALIGNMENT = 16  # bytes, of the rows that torch's grouped product loads
_CAPABILITIES = ((9, 0), (10, 0))  # of the devices for which torch has it
_MOST_EXPERTS = 1000  # that it takes
_HOPPER = (9, 0)
_FEW, _DEPTH = 128, 64  # rows or columns for which tiles by TMA are too large; what they go through at a time


def multiply(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by the matrix of its expert [rows, n]. Without a gradient."""
    if not len(rows):
        return rows.new_empty(0, matrices.shape[2])
    kernels = kernels_for(rows)
    if kernels is None:
        return _multiply_by_loop(rows, matrices, ends)
    tma = tma_kernels_for(rows, matrices, ends)
    if tma is not None:
        product: Tensor = tma.multiply(rows, matrices, ends)
    elif is_native(rows, matrices) and len(ends) <= _MOST_EXPERTS:
        product = F.grouped_mm(rows, matrices, offs=ends)
    else:
        product = kernels_for(rows, module="product_kernels").multiply(rows, matrices, ends)
    kernels.clear_tail(product, ends)
    return product


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Sum left · right over the rows of each expert [experts, m, n]. Without a gradient."""
    if not len(left):
        return left.new_zeros(len(ends), left.shape[1], right.shape[1])
    kernels = kernels_for(left)
    if kernels is None:
        return _outer_by_loop(left, right, ends)
    tma = tma_kernels_for(left, right, ends)
    if tma is not None:
        return tma.outer(left, right, ends)  # type: ignore[no-any-return]
    if is_native(left, right) and len(ends) <= _MOST_EXPERTS:
        product: Tensor = F.grouped_mm(left.t(), right, offs=ends)
        kernels.clear_empty(product, ends)  # torch leaves these as they were in memory
        return product
    return kernels_for(left, module="product_kernels").outer(left, right, ends)  # type: ignore[no-any-return]


def tma_kernels_for(rows: Tensor, other: Tensor, ends: Tensor) -> Any:
    """Return the kernels that compute products of `rows` and matrices, or other rows, by TMA, or None: for
    few rows or columns torch has smaller tiles."""
    if min(len(rows) // len(ends), rows.shape[1], other.shape[-1]) <= _FEW or len(ends) > _MOST_EXPERTS:
        return None
    if not is_native(rows, other) or _capability(rows.device) != _HOPPER or not _has_descriptors():
        return None
    if not rows.is_contiguous() or (other.ndim == 2 and not other.is_contiguous()):
        return None
    if other.ndim == 3 and other.stride(2) == 1 and other.shape[1] % _DEPTH:
        return None  # a tile would reach into the next matrix, whose numbers may be infinite
    return kernels_for(rows, module="tma_kernels")


@cache
def _has_descriptors() -> bool:
    """Return whether this Triton has descriptors of tensors that a launch takes."""
    if torch.version.hip is not None:
        return False  # a chip of AMD that calls itself (9, 0) is no Hopper
    return has_triton() and find_spec("triton.tools.tensor_descriptor") is not None


def is_native(*operands: Tensor) -> bool:
    """Return True if torch's grouped product takes the operands, and stays on the device."""
    return all(map(_is_aligned, operands)) and _capability(operands[0].device) in _CAPABILITIES


def _is_aligned(operand: Tensor) -> bool:
    if operand.dtype != torch.bfloat16 or operand.data_ptr() % _ALIGNMENT:
        return False
    *_, row, column = operand.stride()
    lengths = [stride for stride in operand.stride() if stride != 1] + [operand.shape[-1]]
    return 1 in (row, column) and all(length * 2 % _ALIGNMENT == 0 for length in lengths)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _multiply_by_loop(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    product = rows.new_empty(len(rows), matrices.shape[2])
    last = 0
    for expert, begin, end in _spans(ends):
        torch.mm(rows[begin:end], matrices[expert], out=product[begin:end])
        last = end
    product[last:].zero_()
    return product


def _outer_by_loop(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    product = left.new_empty(len(ends), left.shape[1], right.shape[1])
    empty = set(range(len(ends)))
    for expert, begin, end in _spans(ends):
        torch.mm(left[begin:end].T, right[begin:end], out=product[expert])
        empty.remove(expert)
    for expert in empty:
        product[expert].zero_()
    return product


def _spans(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield each expert that has rows, with the first and the end of them."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            yield expert, begin, end
        begin = end
