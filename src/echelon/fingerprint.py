"""A tensor's bits in two whole numbers: equal tensors have equal ones, in whatever order they are added."""

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # types of whole numbers, by size
_AT_ONCE = 1 << 22  # elements


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """The sum of all elements' bits, and the sum in which each counts as often as its place says."""
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view(_BITS.get(flat.element_size(), torch.uint8))
    plain = placed = 0
    for begin in range(0, bits.numel(), _AT_ONCE):
        part = bits[begin : begin + _AT_ONCE].long()
        plain += int(part.sum())
        placed += int((part * torch.arange(begin + 1, begin + 1 + len(part), device=part.device)).sum())
    return wrapped(plain), wrapped(placed)


def wrapped(number: int) -> int:
    """As 64 bits hold it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
