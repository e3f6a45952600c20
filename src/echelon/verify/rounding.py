"""Stochastic rounding of the reference (masters=false), written out: the noise of every element is a hash of
seed, update, parameter and element.
"""

import torch
from torch import Tensor

from echelon.nn.hashing import WEYL, hash_of, mix_, signed


@torch.no_grad()
def round_keyed(value: Tensor, seed: int, update: int, name: str) -> Tensor:
    """A float32 parameter in bf16 after update number `update`, the first of which is 1."""
    key = hash_of(seed, update, hash_of(*name.encode()))
    words = torch.arange(-(-value.numel() // 4))  # one hash for four elements, 16 bits each
    noise = mix_(words * signed(WEYL) + signed(key)).view(torch.int16).int() & 0xFFFF
    bits = value.flatten().view(torch.int32) + noise[: value.numel()]
    return (bits >> 16).to(torch.int16).view(torch.bfloat16).view_as(value)
