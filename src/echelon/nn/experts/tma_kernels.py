"""Triton kernels of grouped products in bfloat16 for Hopper, whose operands come by TMA.

    multiply    rows · matrices of their experts
    outer       leftᵀ · right of the rows of each expert

As many programs as the device has processors take one tile after the other. The loads of a tile begin while
the one before is written. Counts of rows stay on the device. An activation in the same kernel, or its
gradients, costs more than a kernel of its own: nothing loads or multiplies meanwhile. Import this only where
Triton is installed.
"""

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    TensorDescriptor,
)

from echelon.nn.triton_support import on_device_of

_DEPTH, _STAGES, _WARPS = 64, 3, 8


class _Tile(NamedTuple):
    """Of a product; both take the same registers."""

    rows: int
    columns: int


_WIDE, _TALL = _Tile(128, 256), _Tile(256, 128)


def _tile_of(width: int) -> _Tile:
    """Return the tile that computes few columns behind the last one."""
    return _WIDE if width % _WIDE.columns == 0 else _TALL


def multiply(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the product; rows that belong to no expert are not written."""
    experts, inner, width = matrices.shape
    product = torch.empty(len(rows), width, dtype=rows.dtype, device=rows.device)
    tile, by_row = _tile_of(width), matrices.stride(2) == 1
    flat = (matrices if by_row else matrices.transpose(1, 2)).flatten(0, 1)
    block = [_DEPTH, tile.columns] if by_row else [tile.columns, _DEPTH]
    programs = _programs(rows)
    with on_device_of(rows):
        _multiply[(programs,)](
            TensorDescriptor.from_tensor(rows, [tile.rows, _DEPTH]),
            TensorDescriptor.from_tensor(flat, block),
            product, ends, experts, inner, width,
            all_experts=triton.next_power_of_2(experts), by_row=by_row, tile=tile.rows, columns=tile.columns,
            depth=_DEPTH, programs=programs, num_warps=_WARPS, num_stages=_STAGES,
        )  # fmt: skip
    return product


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _multiply(  # type: ignore[no-untyped-def]
    rows, matrices, product, ends, experts, inner, width,
    all_experts: tl.constexpr, by_row: tl.constexpr, tile: tl.constexpr, columns: tl.constexpr,
    depth: tl.constexpr, programs: tl.constexpr,
):  # fmt: skip
    number = tl.arange(0, all_experts)
    end, begin, last_tile = _tiles(ends, experts, number, tile)
    column_tiles = tl.cdiv(width, columns)
    for place in tl.range(tl.program_id(0), tl.max(last_tile, axis=0) * column_tiles, programs, flatten=True):
        first_column = place % column_tiles * columns
        expert, first_row, end_row = _place(place // column_tiles, end, begin, last_tile, number, tile)
        total = tl.zeros([tile, columns], dtype=tl.float32)
        for start in tl.range(0, inner, depth):
            left = rows.load([first_row, start])
            if by_row:
                right = matrices.load([expert * inner + start, first_column])
            else:
                right = matrices.load([expert * width + first_column, start]).T
            total = tl.dot(left, right, total)
        row = first_row + tl.arange(0, tile)
        column = first_column + tl.arange(0, columns)
        inside = (row < end_row)[:, None] & (column < width)[None, :]
        target = product + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(target, total.to(product.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tiles(ends, experts, number, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the rows of each expert, and how many tiles of rows there are up to its last one."""
    is_expert = number < experts
    end = tl.load(ends + number, mask=is_expert, other=0)
    begin = tl.load(ends + number - 1, mask=(number > 0) & is_expert, other=0)
    return end, begin, tl.cumsum((end - begin + tile - 1) // tile, axis=0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _place(row_tile, end, begin, last_tile, number, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the expert of a tile, its first row, and where the rows of the expert end."""
    expert = tl.sum((last_tile <= row_tile).to(tl.int32), axis=0)
    first_tile = last_tile - (end - begin + tile - 1) // tile
    first_row = tl.sum(tl.where(number == expert, begin + (row_tile - first_tile) * tile, 0), axis=0)
    return expert, first_row, tl.sum(tl.where(number == expert, end, 0), axis=0)


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return the products; that of an expert without rows is 0."""
    experts, height, width = len(ends), left.shape[1], right.shape[1]
    product = torch.empty(experts, height, width, dtype=left.dtype, device=left.device)
    tile, programs = _tile_of(width), _programs(left)
    with on_device_of(left):
        _outer[(programs,)](
            TensorDescriptor.from_tensor(left, [_DEPTH, tile.rows]),
            TensorDescriptor.from_tensor(right, [_DEPTH, tile.columns]),
            product, ends, experts, height, width, tile=tile.rows, columns=tile.columns,
            depth=_DEPTH, programs=programs, num_warps=_WARPS, num_stages=_STAGES,
        )  # fmt: skip
    return product


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _outer(  # type: ignore[no-untyped-def]
    left, right, product, ends, experts, height, width,
    tile: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, programs: tl.constexpr,
):  # fmt: skip
    column_tiles = tl.cdiv(width, columns)
    tiles = tl.cdiv(height, tile) * column_tiles
    for place in tl.range(tl.program_id(0), experts * tiles, programs):
        expert = place // tiles
        first_line = place % tiles // column_tiles * tile
        first_column = place % column_tiles * columns
        begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends + expert)
        full = begin + (end - begin) // depth * depth
        total = tl.zeros([tile, columns], dtype=tl.float32)
        for start in tl.range(begin, full, depth):
            total = tl.dot(left.load([start, first_line]).T, right.load([start, first_column]), total)
        if full < end:  # what follows belongs to the next expert
            is_own = (full + tl.arange(0, depth) < end)[:, None]
            one = tl.where(is_own, left.load([full, first_line]), 0.0).to(product.dtype.element_ty)
            other = tl.where(is_own, right.load([full, first_column]), 0.0).to(product.dtype.element_ty)
            total = tl.dot(one.T, other, total)
        line = first_line + tl.arange(0, tile)
        column = first_column + tl.arange(0, columns)
        target = product + expert.to(tl.int64) * height * width + line[:, None] * width + column[None, :]
        inside = (line < height)[:, None] & (column < width)[None, :]
        tl.store(target, total.to(product.dtype.element_ty), mask=inside)


def _programs(rows: Tensor) -> int:
    return int(torch.cuda.get_device_properties(rows.device).multi_processor_count)
