"""The encodings as Triton kernels: one launch to encode a tensor, and one to decode it.

Their memory is that of the torch operations (packing.py, floats.py), byte for byte. Import this only where
Triton is installed.
"""

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.memory.gist.floats import BLOCK, Parts
from echelon.memory.gist.launch import Launch
from echelon.memory.gist.packing import Layout
from echelon.memory.storages import is_dense

if TYPE_CHECKING:
    from echelon.memory.gist.functions import Window

_TILE = 1024  # elements of a program; three times as many for fp10
_LONG_TILE = 2048
_BYTES = 128  # of a mask, in a program
_BLOCKS = 32  # of fp8, in a program
_DECODED = 16  # the same, of one that decodes
_RELU_BLOCKS = 8  # of one that has a mask too, by two warps


def relu_and_mask(x: Tensor, *, inplace: bool) -> tuple[Tensor, Tensor, Layout]:
    dense = x
    if not is_dense(x):
        dense = (x.relu_() if inplace else x).clone()
    output = x if dense is x and inplace else torch.empty_like(dense)
    num = dense.numel()
    mask = torch.empty(_cdiv(num, 8), dtype=torch.uint8, device=x.device)
    _RELU(_cdiv(num, 8 * _BYTES), (dense, output, mask), num)
    return x if inplace else output, mask, Layout(output.size(), output.stride())


def encoded_relu(x: Tensor, name: str) -> tuple[Tensor, Tensor, Layout, Parts]:
    dense = x if is_dense(x) else x.clone()
    output, num = torch.empty_like(dense), dense.numel()
    mask = torch.empty(_cdiv(num, 8), dtype=torch.uint8, device=x.device)
    parts = _empty_parts(num, name, x.device)
    if name == "fp16":
        _RELU_HALF(_cdiv(num, 8 * _BYTES), (dense, output, mask, *parts), num)
    else:
        num_blocks = len(parts[1])
        _RELU_FP8(_cdiv(num_blocks, _RELU_BLOCKS), (dense, output, mask, *parts), num, num_blocks)
    return output, mask, Layout(output.size(), output.stride()), parts


def _empty_parts(num: int, name: str, device: torch.device) -> Parts:
    if name == "fp16":
        return (torch.empty(num, dtype=torch.float16, device=device),)
    if name == "fp10":
        return (torch.empty(_cdiv(num, 3), dtype=torch.int32, device=device),)
    num_blocks = _cdiv(num, BLOCK)
    codes = torch.empty(num_blocks * BLOCK, dtype=torch.uint8, device=device)
    return codes, torch.empty(num_blocks, dtype=torch.int8, device=device)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _relu_and_mask(x, output, mask, num, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * tile
    byte = tl.arange(0, tile)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    is_in = place < num - first * 8
    value = tl.load(x + first * 8 + place, mask=is_in, other=0.0)
    passes = is_in & ~(value <= 0)
    tl.store(output + first * 8 + place, tl.where(passes, value, 0.0), mask=is_in)
    packed = tl.sum(passes.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
    tl.store(mask + first + byte, packed.to(tl.uint8), mask=byte * 8 < num - first * 8)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _relu_mask_and_half(x, output, mask, half, num, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * tile
    byte = tl.arange(0, tile)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    is_in = place < num - first * 8
    value = tl.load(x + first * 8 + place, mask=is_in, other=0.0)
    passes = is_in & ~(value <= 0)
    value = tl.where(passes, value, 0.0)
    tl.store(output + first * 8 + place, value, mask=is_in)
    packed = tl.sum(passes.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
    tl.store(mask + first + byte, packed.to(tl.uint8), mask=byte * 8 < num - first * 8)
    value = tl.where(value > 65504.0, 65504.0, value)
    tl.store(half + first * 8 + place, value.to(tl.float16), mask=is_in)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _relu_mask_and_fp8(  # type: ignore[no-untyped-def]
    x, output, mask, codes, shifts, num, num_blocks, block_size: tl.constexpr, num_rows: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * num_rows + tl.arange(0, num_rows)
    byte = block[:, None] * (block_size // 8) + tl.arange(0, block_size // 8)[None, :]
    place = byte[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    value = tl.load(x + place, mask=place < num, other=0.0)
    passes = (place < num) & ~(value <= 0)
    value = tl.where(passes, value, 0.0)
    tl.store(output + place, value, mask=place < num)
    packed = tl.sum(passes.to(tl.int32) << tl.arange(0, 8)[None, None, :], axis=2)
    tl.store(mask + byte, packed.to(tl.uint8), mask=byte * 8 < num)
    value = value.to(tl.float32)
    shift = _shift_of_fp8(tl.max(tl.max(_sizes(value), axis=2), axis=1))
    code = _codes_of_fp8(value, shift[:, None, None])
    tl.store(codes + place, code.to(tl.uint8), mask=block[:, None, None] < num_blocks)
    tl.store(shifts + block, shift.to(tl.int8), mask=block < num_blocks)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sizes(value):  # type: ignore[no-untyped-def]
    """Return the sizes that count for the scale of a block: infinity and NaN do not."""
    size = tl.abs(value)
    return tl.where(size <= 3.4028234663852886e38, size, 0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _shift_of_fp8(largest):  # type: ignore[no-untyped-def]
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 126
    shift = tl.minimum(tl.maximum(8 - exponent, -120), 120)
    return tl.where(largest == 0.0, 0, shift)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _codes_of_fp8(value, shift):  # type: ignore[no-untyped-def]
    is_nan = value != value
    value = tl.where(is_nan, 0.0, value)
    factor = ((shift + 127) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(value * factor, -256.0), 256.0)
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = ((tl.abs(scaled) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(magnitude < (121 << 23), small, normal) | ((bits >> 24) & 0x80)
    # The sign of NaN has no meaning.
    return tl.where(is_nan, 0x7F, code)


_RELU, _RELU_HALF = Launch(_relu_and_mask, tile=_BYTES), Launch(_relu_mask_and_half, tile=_BYTES)
_RELU_FP8 = Launch(_relu_mask_and_fp8, num_warps=2, block_size=BLOCK, num_rows=_RELU_BLOCKS)


def masked(gradient: Tensor, mask: Tensor, layout: Layout) -> Tensor:
    if gradient.stride() != layout.stride:
        gradient = gradient.new_empty_strided(*layout).copy_(gradient)
    output = torch.empty_like(gradient)
    num = gradient.numel()
    _MASKED(_cdiv(num, 8 * _BYTES), (gradient, mask, output), num)
    return output


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _masked(gradient, mask, output, num, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * tile
    byte = tl.arange(0, tile)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    is_in = place < num - first * 8
    packed = tl.load(mask + first + byte, mask=byte * 8 < num - first * 8, other=0).to(tl.int32)
    passes = (packed[:, None] >> tl.arange(0, 8)[None, :]) & 1
    value = tl.load(gradient + first * 8 + place, mask=is_in, other=0.0)
    tl.store(output + first * 8 + place, tl.where(passes == 1, value, 0.0), mask=is_in)


_MASKED = Launch(_masked, tile=_BYTES)


def window_places(indices: Tensor, window: "Window", width: int) -> Tensor:
    indices = indices.contiguous()
    num, per_byte = indices.numel(), 8 // window.bits
    num_bytes = _cdiv(num, per_byte)
    places = torch.empty(num_bytes, dtype=torch.uint8, device=indices.device)
    launch = _PLACES[per_byte]
    launch(_cdiv(num_bytes, _TILE), (indices, places), num, width, *_shape(window, indices.shape))
    return places


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _window_places(  # type: ignore[no-untyped-def]
    indices, places, num, width, height_out, width_out,
    stride_y, stride_x, pad_y, pad_x, dilation_y, dilation_x, kernel_x,
    codes_per_byte: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    byte = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    packed = tl.zeros([tile], dtype=tl.int32)
    for part in tl.static_range(codes_per_byte):
        place = byte * codes_per_byte + part
        index = tl.load(indices + place, mask=place < num, other=0)
        row, column = (place // width_out) % height_out, place % width_out
        in_row = (index // width - (row * stride_y - pad_y)) // dilation_y
        in_column = (index % width - (column * stride_x - pad_x)) // dilation_x
        code = tl.where(place < num, in_row * kernel_x + in_column, 0).to(tl.int32)
        packed |= code << (part * (8 // codes_per_byte))
    tl.store(places + byte, packed.to(tl.uint8), mask=byte * codes_per_byte < num)


_PLACES = {each: Launch(_window_places, codes_per_byte=each, tile=_TILE) for each in (1, 2)}


def window_indices(places: Tensor, window: "Window", size: torch.Size, width: int) -> Tensor:
    indices = torch.empty(size, dtype=torch.int64, device=places.device)
    num = indices.numel()
    launch = _INDICES[8 // window.bits]
    launch(_cdiv(num, _TILE), (places, indices), num, width, *_shape(window, size))
    return indices


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _window_indices(  # type: ignore[no-untyped-def]
    places, indices, num, width, height_out, width_out,
    stride_y, stride_x, pad_y, pad_x, dilation_y, dilation_x, kernel_x,
    codes_per_byte: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    packed = tl.load(places + place // codes_per_byte, mask=place < num, other=0).to(tl.int32)
    bits: tl.constexpr = 8 // codes_per_byte
    code = (packed >> ((place % codes_per_byte).to(tl.int32) * bits)) & ((1 << bits) - 1)
    row, column = (place // width_out) % height_out, place % width_out
    in_row = row * stride_y - pad_y + (code // kernel_x) * dilation_y
    in_column = column * stride_x - pad_x + (code % kernel_x) * dilation_x
    tl.store(indices + place, in_row * width + in_column, mask=place < num)


_INDICES = {each: Launch(_window_indices, codes_per_byte=each, tile=_TILE) for each in (1, 2)}


def _shape(window: "Window", size: torch.Size) -> tuple[int, ...]:
    return (size[-2], size[-1], *window.stride, *window.padding, *window.dilation, window.kernel[1])


def encode_floats(dense: Tensor, name: str) -> Parts:
    num = dense.numel()
    parts = _empty_parts(num, name, dense.device)
    if name == "fp16":
        _ENCODE_FP16(_cdiv(num, _LONG_TILE), (dense, *parts), num)
    elif name == "fp10":
        _ENCODE_FP10(_cdiv(len(parts[0]), _TILE), (dense, *parts), num)
    else:
        num_blocks = len(parts[1])
        _ENCODE_FP8(_cdiv(num_blocks, _BLOCKS), (dense, *parts), num, num_blocks)
    return parts


def decode_floats(parts: Parts, name: str, layout: Layout, dtype: torch.dtype) -> Tensor:
    output = torch.empty_strided(*layout, dtype=dtype, device=parts[0].device)
    num = output.numel()
    if name == "fp16":
        _DECODE_FP16(_cdiv(num, _LONG_TILE), (*parts, output), num)
    elif name == "fp10":
        _DECODE_FP10(_cdiv(num, _TILE), (*parts, output), num)
    else:
        _DECODE_FP8(_cdiv(num, BLOCK * _DECODED), (*parts, output), num, torch.finfo(dtype).max)
    return output


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _encode_fp16(x, half, num, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    value = tl.load(x + place, mask=place < num, other=0.0).to(tl.float32)
    value = tl.where(value > 65504.0, 65504.0, value)  # NaN stays
    value = tl.where(value < -65504.0, -65504.0, value)
    tl.store(half + place, value.to(tl.float16), mask=place < num)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode_fp16(half, output, num, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    value = tl.load(half + place, mask=place < num, other=0.0)
    tl.store(output + place, value.to(output.dtype.element_ty), mask=place < num)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _encode_fp10(x, words, num, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    word = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    packed = tl.zeros([tile], dtype=tl.int32)
    for part in tl.static_range(3):
        place = word * 3 + part
        value = tl.load(x + place, mask=place < num, other=0.0).to(tl.float32)
        is_nan = value != value
        value = tl.where(is_nan, 0.0, tl.minimum(tl.maximum(value, -65504.0), 65504.0))
        bits = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        magnitude = bits & 0x7FFF
        rounded = tl.minimum((magnitude + 31 + ((magnitude >> 6) & 1)) >> 6, 0x1EF)
        code = tl.where(is_nan, 0x1F8, rounded | ((bits & 0x8000) >> 6))
        packed |= code << (10 * part)
    tl.store(words + word, packed, mask=word * 3 < num)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode_fp10(words, output, num, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    word = tl.load(words + place // 3, mask=place < num, other=0)
    code = (word >> ((place % 3).to(tl.int32) * 10)) & 0x3FF
    bits = ((code & 0x1FF) << 6) | ((code & 0x200) << 6)
    value = bits.to(tl.int16).to(tl.float16, bitcast=True)
    tl.store(output + place, value.to(output.dtype.element_ty), mask=place < num)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _encode_fp8(x, codes, shifts, num, num_blocks, block_size: tl.constexpr, num_rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * num_rows + tl.arange(0, num_rows)
    place = block[:, None] * block_size + tl.arange(0, block_size)[None, :]
    value = tl.load(x + place, mask=place < num, other=0.0).to(tl.float32)
    shift = _shift_of_fp8(tl.max(_sizes(value), axis=1))
    code = _codes_of_fp8(value, shift[:, None])
    tl.store(codes + place, code.to(tl.uint8), mask=block[:, None] < num_blocks)
    tl.store(shifts + block, shift.to(tl.int8), mask=block < num_blocks)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode_fp8(codes, shifts, output, num, largest, block_size: tl.constexpr, num_rows: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * num_rows + tl.arange(0, num_rows)
    place = block[:, None] * block_size + tl.arange(0, block_size)[None, :]
    code = tl.load(codes + place, mask=place < num, other=0).to(tl.int32)
    shift = tl.load(shifts + block, mask=block * block_size < num, other=0).to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where((code & 0x80) != 0, -value, value)
    value = value * ((127 - shift) << 23).to(tl.float32, bitcast=True)[:, None]
    value = tl.minimum(tl.maximum(value, -largest), largest)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    tl.store(output + place, value.to(output.dtype.element_ty), mask=place < num)


_ENCODE_FP16, _DECODE_FP16 = (Launch(each, tile=_LONG_TILE) for each in (_encode_fp16, _decode_fp16))
_ENCODE_FP10, _DECODE_FP10 = Launch(_encode_fp10, tile=_TILE), Launch(_decode_fp10, tile=_TILE)
_ENCODE_FP8 = Launch(_encode_fp8, block_size=BLOCK, num_rows=_BLOCKS)
_DECODE_FP8 = Launch(_decode_fp8, block_size=BLOCK, num_rows=_DECODED)


def _cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)
