"""The encodings as Triton kernels: one launch to encode a tensor, and one to decode it.

Their memory is that of the torch operations (bits.py, floats.py), byte for byte. Import this only where
Triton is installed.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.gist.dense import Layout, flatten
from echelon.gist.floats import BLOCK, Parts

if TYPE_CHECKING:
    from echelon.gist.functions import Window

_TILE = 1024  # elements of a program; three times as many for fp10
_BLOCKS = 32  # of fp8, in a program


def relu_and_mask(x: Tensor, *, inplace: bool) -> tuple[Tensor, Tensor, Layout]:
    flat, layout = flatten(x)
    output = x if inplace else layout.shape(torch.empty_like(flat))
    into = flat if inplace else output.as_strided((flat.numel(),), (1,))
    if inplace and flat.data_ptr() != x.data_ptr():  # a copy, of a tensor with gaps
        x.relu_()
        flat, layout = flatten(x)
        into = torch.empty_like(flat)
    mask = torch.empty(triton.cdiv(len(flat), 8), dtype=torch.uint8, device=x.device)
    with _on_device_of(x):
        _relu_and_mask[(triton.cdiv(len(flat), 8 * _TILE),)](flat, into, mask, len(flat), tile=_TILE)
    return output, mask, layout


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _relu_and_mask(x, output, mask, num, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    byte = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    value = tl.load(x + place, mask=place < num, other=0.0)
    passes = (place < num) & ~(value <= 0)
    tl.store(output + place, tl.where(passes, value, 0.0), mask=place < num)
    packed = tl.sum(passes.to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
    tl.store(mask + byte, packed.to(tl.uint8), mask=byte * 8 < num)


def masked(gradient: Tensor, mask: Tensor, layout: Layout) -> Tensor:
    if gradient.stride() != layout.stride:
        gradient = gradient.new_empty_strided(*layout).copy_(gradient)
    output = torch.empty_like(gradient)
    num = gradient.numel()
    with _on_device_of(gradient):
        _masked[(triton.cdiv(num, _TILE),)](gradient, mask, output, num, tile=_TILE)
    return output


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _masked(gradient, mask, output, num, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    packed = tl.load(mask + place // 8, mask=place < num, other=0).to(tl.int32)
    passes = (packed >> (place % 8).to(tl.int32)) & 1
    value = tl.load(gradient + place, mask=place < num, other=0.0)
    tl.store(output + place, tl.where(passes == 1, value, 0.0), mask=place < num)


def window_places(indices: Tensor, window: "Window", width: int) -> Tensor:
    indices = indices.contiguous()
    num, per_byte = indices.numel(), 8 // window.bits
    places = torch.empty(triton.cdiv(num, per_byte), dtype=torch.uint8, device=indices.device)
    with _on_device_of(indices):
        _window_places[(triton.cdiv(len(places), _TILE),)](
            indices, places, num, width, *_shape(window, indices), codes_per_byte=per_byte, tile=_TILE
        )
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


def window_indices(places: Tensor, window: "Window", size: torch.Size, width: int) -> Tensor:
    indices = torch.empty(size, dtype=torch.int64, device=places.device)
    num, per_byte = indices.numel(), 8 // window.bits
    with _on_device_of(places):
        _window_indices[(triton.cdiv(num, _TILE),)](
            places, indices, num, width, *_shape(window, indices), codes_per_byte=per_byte, tile=_TILE
        )
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


def _shape(window: "Window", outputs: Tensor) -> tuple[int, ...]:
    sizes = (outputs.shape[-2], outputs.shape[-1])
    return (*sizes, *window.stride, *window.padding, *window.dilation, window.kernel[1])


def encode_floats(flat: Tensor, name: str) -> Parts:
    num = len(flat)
    with _on_device_of(flat):
        if name == "fp10":
            words = torch.empty(triton.cdiv(num, 3), dtype=torch.int32, device=flat.device)
            _encode_fp10[(triton.cdiv(len(words), _TILE),)](flat, words, num, tile=_TILE)
            return (words,)
        num_blocks = triton.cdiv(num, BLOCK)
        codes = torch.empty(num_blocks * BLOCK, dtype=torch.uint8, device=flat.device)
        shifts = torch.empty(num_blocks, dtype=torch.int8, device=flat.device)
        grid = (triton.cdiv(num_blocks, _BLOCKS),)
        _encode_fp8[grid](flat, codes, shifts, num, num_blocks, block_size=BLOCK, num_rows=_BLOCKS)
        return codes, shifts


def decode_floats(parts: Parts, name: str, num: int, dtype: torch.dtype) -> Tensor:
    flat = torch.empty(num, dtype=dtype, device=parts[0].device)
    grid = (triton.cdiv(num, _TILE),)
    with _on_device_of(flat):
        if name == "fp10":
            _decode_fp10[grid](*parts, flat, num, tile=_TILE)
        else:
            _decode_fp8[grid](*parts, flat, num, torch.finfo(dtype).max, block_size=BLOCK, tile=_TILE)
    return flat


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
    is_nan = value != value
    value = tl.where(is_nan, 0.0, value)
    size = tl.abs(value)
    largest = tl.max(tl.where(size > 3.4028234663852886e38, 0.0, size), axis=1)
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 126
    shift = tl.minimum(tl.maximum(8 - exponent, -120), 120)
    shift = tl.where(largest == 0.0, 0, shift)
    factor = ((shift + 127) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(value * factor[:, None], -256.0), 256.0)
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = ((tl.abs(scaled) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(magnitude < (121 << 23), small, normal) | ((bits >> 24) & 0x80)
    # Of which sign NaN is, nobody asks.
    code = tl.where(is_nan, 0x7F, code)
    tl.store(codes + place, code.to(tl.uint8), mask=block[:, None] < num_blocks)
    tl.store(shifts + block, shift.to(tl.int8), mask=block < num_blocks)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode_fp8(codes, shifts, output, num, largest, block_size: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    code = tl.load(codes + place, mask=place < num, other=0).to(tl.int32)
    shift = tl.load(shifts + place // block_size, mask=place < num, other=0).to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where((code & 0x80) != 0, -value, value)
    value = value * ((127 - shift) << 23).to(tl.float32, bitcast=True)
    value = tl.minimum(tl.maximum(value, -largest), largest)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    tl.store(output + place, value.to(output.dtype.element_ty), mask=place < num)


def _on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    is_current = not tensor.is_cuda or tensor.device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(tensor.device)
