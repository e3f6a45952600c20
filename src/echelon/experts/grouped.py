"""Products of sorted rows with the matrices of their experts.

    multiply    rows [rows, m] · matrices [experts, m, n]    each row by the matrix of its expert
    outer       left [rows, m]ᵀ · right [rows, n]            one product [m, n] for each expert, of its rows

`ends` says where the rows of each expert end, on the device. Rows behind the last of them belong to none:
their product is 0. An expert without rows has an outer product of 0.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def multiply(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each row times the matrix of its expert [rows, n]. Without a gradient."""
    product = rows.new_empty(len(rows), matrices.shape[2])
    last = 0
    for expert, begin, end in _spans(ends):
        torch.mm(rows[begin:end], matrices[expert], out=product[begin:end])
        last = end
    product[last:].zero_()
    return product


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The sum over the rows of each expert of left · right [experts, m, n]. Without a gradient."""
    product = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for expert, begin, end in _spans(ends):
        torch.mm(left[begin:end].T, right[begin:end], out=product[expert])
    return product


def _spans(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """Each expert that has rows, with the first and the end of them."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            yield expert, begin, end
        begin = end
