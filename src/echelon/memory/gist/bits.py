"""Small integers, packed into bytes: the first ones are in the lowest bits.

1 bit     0 1 1 0 0 0 0 1  →  0b10000110
4 bits    3 15             →  0b11110011
"""

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes of 1, 4 or 8 `bits`, flat, as bytes; what is left of the last byte is 0."""
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
    """The first `num` codes, as uint8."""
    if bits == 8:
        return packed[:num]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
    return codes.flatten()[:num]
