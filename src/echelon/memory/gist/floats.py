"""Real numbers in fewer bits. What is larger than the largest number of a format becomes that number.

    format   bits: sign exponent mantissa    largest    memory
    fp16           1     5       10          65504      2 bytes
    fp10           1     5        4          63488      4 bytes for three
    fp8            1     4        3          see below  1 byte, and one for 128 numbers

fp8 scales every 128 numbers by a power of two, so that the largest of them is between 128 and 256: no number
overflows, and those 2**17 times smaller than the largest become 0. Infinity becomes 256 of these. What would
be rounded up to more than the largest number of its type becomes that number.

Float64 is the type of proofs: its numbers keep all their bits, so that what is proven of a plan does not
depend on how numbers are rounded.
"""

import torch
from torch import Tensor

EXACT = "exact"
FORMATS = ("fp16", "fp10", "fp8")
BLOCK = 128
_LARGEST = 65504.0  # of fp16
_LARGEST_CODE = 0x1EF  # of fp10, without its sign
_NAN_CODE = 0x1F8
_MOST_SHIFT = 120  # of exponents, so that the factor is itself a normal number

_BYTES = {"fp16": 2.0, "fp10": 4 / 3, "fp8": 1 + 1 / BLOCK}
_TYPES = (torch.float32, torch.bfloat16, torch.float16)

Parts = tuple[Tensor, ...]


def format_for(dtype: torch.dtype, name: str) -> str | None:
    """In which format a tensor of this type is kept; None where it would not be smaller."""
    if dtype == torch.float64:
        return EXACT
    return name if dtype in _TYPES and _BYTES[name] < dtype.itemsize else None


def encode(flat: Tensor, name: str) -> Parts:
    """A flat tensor, in the memory of a format."""
    if name == EXACT:
        return (flat.view(torch.int64).clone(),)
    if name == "fp8":
        return _encode_fp8(flat)
    half = flat.to(torch.float16).clamp(-_LARGEST, _LARGEST)
    return (half,) if name == "fp16" else (_encode_fp10(half),)


def decode(parts: Parts, name: str, num: int, dtype: torch.dtype) -> Tensor:
    """The first `num` numbers, flat."""
    if name == EXACT:
        return parts[0].view(torch.float64).clone()
    if name == "fp8":
        largest = torch.finfo(dtype).max
        return _decode_fp8(*parts)[:num].clamp_(-largest, largest).to(dtype)
    if name == "fp16":
        return parts[0].to(dtype)
    return _decode_fp10(parts[0])[:num].to(dtype)


def _encode_fp10(half: Tensor) -> Tensor:
    """The first 10 bits of fp16, rounded to the nearest, or the even one of two."""
    bits = half.view(torch.int16).int()
    magnitude = bits & 0x7FFF
    rounded = ((magnitude + 31 + ((magnitude >> 6) & 1)) >> 6).clamp(max=_LARGEST_CODE)
    rounded = torch.where(magnitude > 0x7C00, _NAN_CODE, rounded)
    codes = rounded | ((bits & 0x8000) >> 6)
    codes = torch.nn.functional.pad(codes, (0, -len(codes) % 3)).view(-1, 3)
    return codes[:, 0] | (codes[:, 1] << 10) | (codes[:, 2] << 20)


def _decode_fp10(packed: Tensor) -> Tensor:
    shifts = torch.tensor([0, 10, 20], dtype=torch.int32, device=packed.device)
    codes = ((packed[:, None] >> shifts) & 0x3FF).flatten()
    bits = ((codes & 0x1FF) << 6) - ((codes & 0x200) << 6)
    return bits.to(torch.int16).view(torch.float16)


def _encode_fp8(flat: Tensor) -> tuple[Tensor, Tensor]:
    blocks = torch.nn.functional.pad(flat.float(), (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().nan_to_num(0.0, posinf=0.0).amax(1)
    shifts = (8 - torch.frexp(largest).exponent).clamp(-_MOST_SHIFT, _MOST_SHIFT)
    shifts = torch.where(largest == 0, 0, shifts)
    scaled = torch.ldexp(blocks, shifts[:, None]).clamp(-256.0, 256.0)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(), shifts.to(torch.int8)


def _decode_fp8(codes: Tensor, shifts: Tensor) -> Tensor:
    blocks = codes.view(torch.float8_e4m3fn).float().view(-1, BLOCK)
    return torch.ldexp(blocks, -shifts[:, None].int()).flatten()
