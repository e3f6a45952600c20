"""Products of sorted rows with the matrices of their experts.

    multiply    rows [rows, m] · matrices [experts, m, n]    each row by the matrix of its expert
    outer       left [rows, m]ᵀ · right [rows, n]            one product [m, n] for each expert, of its rows

`ends` says where the rows of each expert end, on the device. Rows behind the last of them belong to none:
their product is 0. An expert without rows has an outer product of 0.

A CUDA device is not read from, but for float64 or without Triton.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.nn.experts.backend import kernels_for

_ALIGNMENT = 16  # bytes, of the rows that torch's grouped product loads
_CAPABILITIES = ((9, 0), (10, 0))  # of the devices for which torch has it
_MOST_EXPERTS = 1000  # that it takes


def multiply(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each row times the matrix of its expert [rows, n]. Without a gradient."""
    if not len(rows):
        return rows.new_empty(0, matrices.shape[2])
    kernels = kernels_for(rows)
    if kernels is None:
        return _multiply_by_loop(rows, matrices, ends)
    if is_native(rows, matrices) and len(ends) <= _MOST_EXPERTS:
        product: Tensor = _grouped_product()(rows, matrices, offs=ends)
    else:
        from echelon.nn.experts import grouped_kernel  # imports Triton

        product = grouped_kernel.multiply(rows, matrices, ends)
    kernels.clear_tail(product, ends)
    return product


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The sum over the rows of each expert of left · right [experts, m, n]. Without a gradient."""
    if not len(left):
        return left.new_zeros(len(ends), left.shape[1], right.shape[1])
    kernels = kernels_for(left)
    if kernels is None:
        return _outer_by_loop(left, right, ends)
    if is_native(left, right) and len(ends) <= _MOST_EXPERTS:
        product: Tensor = _grouped_product()(left.t(), right, offs=ends)
        kernels.clear_empty(product, ends)
        return product
    from echelon.nn.experts import grouped_kernel  # imports Triton

    return grouped_kernel.outer(left, right, ends)


def is_native(*operands: Tensor) -> bool:
    """Whether torch's grouped product takes them, and stays on the device."""
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


@cache
def _grouped_product() -> Any:
    return getattr(F, "grouped_mm", None) or torch._grouped_mm


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
    """Each expert that has rows, with the first and the end of them."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            yield expert, begin, end
        begin = end
