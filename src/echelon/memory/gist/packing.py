"""Tensors as flat memory, and small integers packed into bytes: the first ones are in the lowest bits.

1 bit     0 1 1 0 0 0 0 1  →  0b10000110
4 bits    3 15             →  0b11110011
"""

from typing import NamedTuple

import torch
from torch import Tensor

from echelon.memory.storages import is_dense


class Layout(NamedTuple):
    """The order of the elements of a tensor in memory without gaps."""

    size: torch.Size
    stride: tuple[int, ...]

    def shape(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.size, self.stride)


def flatten(tensor: Tensor) -> tuple[Tensor, Layout]:
    """Return the elements in the order of memory; of a tensor with gaps, those of a copy without them."""
    tensor = tensor.detach()
    if not is_dense(tensor):
        tensor = tensor.clone()
    return tensor.as_strided((tensor.numel(),), (1,)), Layout(tensor.size(), tensor.stride())


def shares_elements(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as those of an expanded one."""
    return tensor.nbytes > tensor.untyped_storage().nbytes()


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack flat codes of 1, 4 or 8 `bits` into bytes; the rest of the last byte is 0."""
    codes = codes.to(torch.uint8)
    if bits == 8:
        return codes.clone()
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % per_byte)).view(-1, per_byte)
    packed = padded[:, 0].clone()
    for place in range(1, per_byte):
        packed |= padded[:, place] << (bits * place)
    return packed


def unpack(packed: Tensor, bits: int, num: int) -> Tensor:
    """Return the first `num` codes, as uint8."""
    if bits == 8:
        return packed[:num]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return codes.flatten()[:num]
