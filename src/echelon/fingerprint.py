"""Two integers that stand for the bits of a tensor: equal tensors have equal fingerprints."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_AT_ONCE = 1 << 22  # elements that are summed at a time: bounds the memory


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """The sum of all elements' bits as integers, and their sum weighted by position, as 64 bits hold them."""
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.uint8))
    plain = weighted = 0
    for begin in range(0, bits.numel(), _AT_ONCE):
        part = bits[begin : begin + _AT_ONCE].long()
        plain += int(part.sum())
        weighted += int((part * torch.arange(begin + 1, begin + 1 + len(part), device=part.device)).sum())
    return wrapped(plain), wrapped(weighted)


def wrapped(number: int) -> int:
    """An integer modulo 2⁶⁴, as int64 holds it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
