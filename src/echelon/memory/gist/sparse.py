"""Tensors with many zeros: their non-zero values, and where these are.

    rows      0 5 0 0 7 0 … │ 0 0 2 0 …        rows of 256 elements
    values    5 7 … 2 …                        in order
    places    one byte for each value: where in its row it is; and how many values each row has
    or        one bit for each element: whether it is a value

One-byte places are the smaller form if less than an eighth of the elements are values. Zero is what has no
bit set: −0.0 is a value, so that all bits come back.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from echelon.memory.gist.packing import pack, unpack

ROW = 256
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sparse(NamedTuple):
    """The parts of an encoded tensor, all on its device."""

    values: Tensor
    places: Tensor  # bytes: of values in their rows, or a bit for each element
    counts: Tensor  # of each row; empty where places are bits


def encode(flat: Tensor) -> Sparse | None:
    """The smaller form, or None where neither is smaller than the tensor. Reads the number of values."""
    is_value = flat.view(_INTEGERS[flat.element_size()]) != 0
    num_values, num_rows = int(is_value.sum()), -(-len(flat) // ROW)
    as_places, as_bits = num_values + 2 * num_rows, -(-len(flat) // 8)
    if num_values * flat.element_size() + min(as_places, as_bits) >= flat.nbytes:
        return None
    values = flat[is_value]
    if as_bits <= as_places:
        return Sparse(values, pack(is_value, 1), flat.new_empty(0, dtype=torch.int16))
    rows = torch.nn.functional.pad(is_value, (0, -len(flat) % ROW)).view(-1, ROW)
    places = rows.nonzero()[:, 1].to(torch.uint8)
    return Sparse(values, places, rows.sum(1, dtype=torch.int16))


def decode(parts: Sparse, num: int) -> Tensor:
    flat = parts.values.new_zeros(num)
    if not len(parts.counts):
        flat[unpack(parts.places, 1, num).bool()] = parts.values
        return flat
    rows = torch.arange(len(parts.counts), device=flat.device)
    starts = ROW * torch.repeat_interleave(rows, parts.counts.long(), output_size=len(parts.values))
    flat[starts + parts.places] = parts.values
    return flat
