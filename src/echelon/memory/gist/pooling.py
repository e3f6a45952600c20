"""Max-pooling whose backward pass needs 4 bits for each output, as Triton kernels: one launch each way.

torch writes an index of 64 bits for each output, which the backward pass reads again. Here the forward pass
writes places in windows at once, and each input looks up the windows that it is in:

    input     a b c d       windows of 3, stride 2, padding 1     forward   0: max(a b)    1: max(b c d)
    output    0 1                                                 backward  b: of 0, if its place is b's,
                                                                            and then of 1
Sums are in the order of torch's. Import this only where Triton is installed.
"""

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.memory.gist.launch import Launch

if TYPE_CHECKING:
    from echelon.memory.gist.functions import Window

_BYTES = 256  # of places, in a program
_TILE = 1024  # numbers of an input, in a program; of one that looks up several windows a quarter
_MOST = 2**31 - 2 * _TILE  # of a tensor: places are integers of 32 bits
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def suits(x: Tensor, window: "Window") -> bool:
    """Return whether the kernels take such a tensor. torch refuses other paddings, strides and sizes."""
    if x.dtype not in _DTYPES or x.dim() not in (3, 4) or not x.is_contiguous() or not 0 < x.numel() < _MOST:
        return False
    if window.bits != 4 or window.dilation != (1, 1) or min(window.padding) < 0 or min(window.stride) < 1:
        return False
    is_wide = any(2 * padding > kernel for padding, kernel in zip(window.padding, window.kernel, strict=True))
    return not is_wide and 0 < window.output_size(x.size()).numel() < _MOST


def max_pool(x: Tensor, window: "Window") -> tuple[Tensor, Tensor]:
    """The output, and where in its window each element was: 4 bits each."""
    size = window.output_size(x.size())
    output = torch.empty(size, dtype=x.dtype, device=x.device)
    num_bytes = triton.cdiv(output.numel(), 2)
    places = torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
    launch = _forward(window, x.dtype is torch.float64)
    launch(triton.cdiv(num_bytes, _BYTES), (x, output, places), output.numel(), *x.shape[-2:], *size[-2:])
    return output, places


def max_pool_backward(
    gradient: Tensor, places: Tensor, window: "Window", size: torch.Size, output: torch.Size
) -> Tensor:
    """The gradient of an input of this size. `output`: the size of the output."""
    gradient = gradient.contiguous()
    result = torch.empty(size, dtype=gradient.dtype, device=gradient.device)
    launch, tile = _backward(window, gradient.dtype is torch.float64)
    num = result.numel()
    launch(triton.cdiv(num, tile), (gradient, places, result), num, *size[-2:], *output[-2:])
    return result


@cache
def _forward(window: "Window", is_wide: bool) -> Launch:
    return Launch(_max_pool, **_constants(window), wide=int(is_wide), tile=_BYTES)


@cache
def _backward(window: "Window", is_wide: bool) -> tuple[Launch, int]:
    """The kernel, and its numbers of a program."""
    rows, columns = (-(-window.kernel[dim] // window.stride[dim]) for dim in (0, 1))  # windows of an input
    tile = _TILE if rows * columns == 1 else _TILE // 4
    constants = {"windows_y": rows, "windows_x": columns, "wide": int(is_wide), "tile": tile}
    return Launch(_max_pool_back, **_constants(window), **constants), tile


def _constants(window: "Window") -> dict[str, int]:
    """What a kernel is compiled for."""
    fields = {"kernel": window.kernel, "stride": window.stride, "pad": window.padding}
    return {f"{name}_{axis}": pair[dim] for name, pair in fields.items() for dim, axis in enumerate("yx")}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _max_pool(  # type: ignore[no-untyped-def]
    x, output, places, num, height, width, height_out, width_out,
    kernel_y: tl.constexpr, kernel_x: tl.constexpr, stride_y: tl.constexpr, stride_x: tl.constexpr,
    pad_y: tl.constexpr, pad_x: tl.constexpr, wide: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = tl.float64 if wide else tl.float32
    byte = tl.program_id(0) * tile + tl.arange(0, tile)
    place = byte[:, None] * 2 + tl.arange(0, 2)[None, :]
    is_in = place < num
    column, rest = place % width_out, place // width_out
    row, plane = rest % height_out, rest // height_out
    top, left = row * stride_y - pad_y, column * stride_x - pad_x
    start = plane * height * width
    largest = tl.full([tile, 2], float("-inf"), kind)
    code = tl.full([tile, 2], -1, tl.int32)
    for in_row in tl.static_range(kernel_y):
        for in_column in tl.static_range(kernel_x):
            y, z = top + in_row, left + in_column
            inside = is_in & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            value = tl.load(x + start + y * width + z, mask=inside, other=float("-inf")).to(kind)
            takes = inside & ((value > largest) | (value != value))  # the last NaN, as torch does
            is_first = inside & (code < 0)
            code = tl.where(takes | is_first, in_row * kernel_x + in_column, code)
            largest = tl.where(takes, value, largest)
    tl.store(output + place, largest.to(output.dtype.element_ty), mask=is_in)
    packed = tl.sum(tl.where(is_in, code, 0) << (tl.arange(0, 2)[None, :] * 4), axis=1)
    tl.store(places + byte, packed.to(tl.uint8), mask=byte * 2 < num)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _max_pool_back(  # type: ignore[no-untyped-def]
    gradient, places, result, num, height, width, height_out, width_out,
    kernel_y: tl.constexpr, kernel_x: tl.constexpr, stride_y: tl.constexpr, stride_x: tl.constexpr,
    pad_y: tl.constexpr, pad_x: tl.constexpr, windows_y: tl.constexpr, windows_x: tl.constexpr,
    wide: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    is_in = place < num
    column, rest = place % width + pad_x, place // width
    row, plane = rest % height + pad_y, rest // height
    start = plane * height_out * width_out
    total = tl.zeros([tile], tl.float64 if wide else tl.float32)
    for above in tl.static_range(windows_y):
        out_row = row // stride_y - (windows_y - 1 - above)
        in_row = row - out_row * stride_y
        is_row = is_in & (out_row >= 0) & (out_row < height_out) & (in_row < kernel_y)
        for before in tl.static_range(windows_x):
            out_column = column // stride_x - (windows_x - 1 - before)
            in_column = column - out_column * stride_x
            is_window = is_row & (out_column >= 0) & (out_column < width_out) & (in_column < kernel_x)
            index = start + out_row * width_out + out_column
            packed = tl.load(places + index // 2, mask=is_window, other=0).to(tl.int32)
            code = (packed >> ((index % 2) * 4)) & 15
            is_here = is_window & (code == in_row * kernel_x + in_column)
            total += tl.load(gradient + index, mask=is_here, other=0.0).to(total.dtype)
    tl.store(result + place, total.to(result.dtype.element_ty), mask=is_in)
