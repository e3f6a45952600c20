"""Triton kernels of grouped products, where torch has none that stays on the device: float16, float32, and
sizes that its own does not take.

    multiply    a program has a tile of the rows of one expert, times some columns of its matrix
    outer       a program has a tile of the product of one expert, and goes through its rows

Import this only where Triton is installed.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.nn.triton_support import on_device_of


def multiply(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the product; rows that belong to no expert are not written."""
    experts, inner, outer_size = matrices.shape
    product = torch.empty(len(rows), outer_size, dtype=rows.dtype, device=rows.device)
    tile, depth = _sizes(rows.dtype)
    row_tiles = triton.cdiv(len(rows), tile) + experts  # the last tile of each expert may be partly empty
    column_tiles = triton.cdiv(outer_size, tile)
    with on_device_of(rows):
        _multiply[(row_tiles * column_tiles,)](
            rows, matrices, product, ends, experts, inner, outer_size, column_tiles, *matrices.stride(),
            all_experts=triton.next_power_of_2(experts), tile=tile, depth=depth,
            precision=_precision(), num_warps=4,
        )  # fmt: skip
    return product


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _multiply(  # type: ignore[no-untyped-def]
    rows, matrices, product, ends, experts, inner, outer_size, column_tiles,
    matrix_stride, inner_stride, outer_stride,
    all_experts: tl.constexpr, tile: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    row_tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    number = tl.arange(0, all_experts)
    end = tl.load(ends + number, mask=number < experts, other=0)
    begin = tl.load(ends + number - 1, mask=(number > 0) & (number < experts), other=0)
    tiles = (end - begin + tile - 1) // tile
    last_tile = tl.cumsum(tiles, axis=0)
    expert = tl.sum((last_tile <= row_tile).to(tl.int32), axis=0)
    if expert < experts:
        chosen = number == expert
        first_tile = tl.sum(tl.where(chosen, last_tile - tiles, 0), axis=0)
        first_row = tl.sum(tl.where(chosen, begin, 0), axis=0)
        end_row = tl.sum(tl.where(chosen, end, 0), axis=0)
        row = (first_row + (row_tile - first_tile) * tile + tl.arange(0, tile)).to(tl.int64)
        column = column_tile * tile + tl.arange(0, tile)
        matrix = matrices + expert.to(tl.int64) * matrix_stride
        total = tl.zeros([tile, tile], dtype=tl.float32)
        for start in range(0, inner, depth):
            place = start + tl.arange(0, depth)
            left = tl.load(
                rows + row[:, None] * inner + place[None, :],
                mask=(row < end_row)[:, None] & (place < inner)[None, :],
                other=0.0,
            )
            right = tl.load(
                matrix + place[:, None] * inner_stride + column[None, :] * outer_stride,
                mask=(place < inner)[:, None] & (column < outer_size)[None, :],
                other=0.0,
            )
            total = tl.dot(left, right, total, input_precision=precision)
        tl.store(
            product + row[:, None] * outer_size + column[None, :],
            total.to(product.dtype.element_ty),
            mask=(row < end_row)[:, None] & (column < outer_size)[None, :],
        )


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    experts, height, width = len(ends), left.shape[1], right.shape[1]
    product = torch.empty(experts, height, width, dtype=left.dtype, device=left.device)
    tile, depth = _sizes(left.dtype)
    tiles = triton.cdiv(height, tile) * triton.cdiv(width, tile)
    with on_device_of(left):
        _outer[(experts * tiles,)](
            left, right, product, ends, height, width, tiles, triton.cdiv(width, tile),
            tile=tile, depth=depth, precision=_precision(), num_warps=4,
        )  # fmt: skip
    return product


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _outer(  # type: ignore[no-untyped-def]
    left, right, product, ends, height, width, tiles, column_tiles,
    tile: tl.constexpr, depth: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    expert, place = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    line = (place // column_tiles) * tile + tl.arange(0, tile)
    column = (place % column_tiles) * tile + tl.arange(0, tile)
    total = tl.zeros([tile, tile], dtype=tl.float32)
    for start in range(begin, end, depth):
        row = (start + tl.arange(0, depth)).to(tl.int64)
        one = tl.load(
            left + row[None, :] * height + line[:, None],
            mask=(row < end)[None, :] & (line < height)[:, None],
            other=0.0,
        )
        other = tl.load(
            right + row[:, None] * width + column[None, :],
            mask=(row < end)[:, None] & (column < width)[None, :],
            other=0.0,
        )
        total = tl.dot(one, other, total, input_precision=precision)
    target = product + expert.to(tl.int64) * height * width
    tl.store(
        target + line[:, None] * width + column[None, :],
        total.to(product.dtype.element_ty),
        mask=(line < height)[:, None] & (column < width)[None, :],
    )


def _sizes(dtype: torch.dtype) -> tuple[int, int]:
    """Return the rows and columns of a tile of the product, and the depth of the tiles it is made of."""
    return (64, 32) if dtype == torch.float32 else (128, 32)


def _precision() -> str:
    """Return how torch multiplies float32, in Triton's words."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
