"""Triton kernels of expert layers: what happens to rows, and their products with the matrices of experts.

Each kernel reads and writes memory once, and adds up in float32. The number of rows changes from call to
call, so no kernel is compiled for one of them. Import this only where Triton is installed.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.nn.triton_support import on_device_of

_MOST_COLUMNS = 2048  # of a row, in a program
_GATHERED_ELEMENTS = 8192  # in a program
_ROWS, _COLUMNS = 16, 128  # of a tile of an activation
_CLEARED_ROWS, _CLEARED_ELEMENTS, _CLEARING_PROGRAMS = 64, 4096, 64

_NONE, _SWIGLU, _GELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FUNCTIONS = {"none": 0, "swiglu": 1, "gelu": 2}


def gather_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    width = x.shape[1]
    rows = torch.empty(len(order), width, dtype=x.dtype, device=x.device)
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    per_program = _GATHERED_ELEMENTS // columns
    grid = (triton.cdiv(len(order), per_program), triton.cdiv(width, columns))
    with on_device_of(x):
        _gather_rows[grid](
            x, order, rows, len(order), width, k, per_program=per_program, columns=columns, num_warps=8
        )
    return rows


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _gather_rows(  # type: ignore[no-untyped-def]
    x, order, rows, num_rows, width, k, per_program: tl.constexpr, columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    token = tl.load(order + row, mask=row < num_rows, other=0) // k
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    values = tl.load(x + token[:, None] * width + column[None, :], mask=inside)
    tl.store(rows + row[:, None] * width + column[None, :], values, mask=inside)


def sum_slots(rows: Tensor, inverse: Tensor) -> Tensor:
    (tokens, k), width = inverse.shape, rows.shape[1]
    total = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    with on_device_of(rows):
        _sum_slots[(tokens, triton.cdiv(width, columns))](
            rows, inverse, total, width, k=k, columns=columns, num_warps=4
        )
    return total


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum_slots(rows, inverse, total, width, k: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    accumulated = tl.zeros([columns], dtype=tl.float32)
    for slot in tl.static_range(k):
        row = tl.load(inverse + token * k + slot)
        accumulated += tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + token * width + column, accumulated.to(total.dtype.element_ty), mask=inside)


def activate(rows: Tensor, weights: Tensor | None, function: str) -> Tensor:
    width = rows.shape[1] // 2 if function == "swiglu" else rows.shape[1]
    hidden = torch.empty(len(rows), width, dtype=rows.dtype, device=rows.device)
    grid = (triton.cdiv(len(rows), _ROWS), triton.cdiv(width, _COLUMNS))
    with on_device_of(rows):
        _activate[grid](
            rows, weights, hidden, len(rows), width,
            function=_FUNCTIONS[function], num=_ROWS, columns=_COLUMNS, num_warps=4,
        )  # fmt: skip
    return hidden


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _activate(  # type: ignore[no-untyped-def]
    rows, weights, hidden, num_rows, width,
    function: tl.constexpr, num: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * num + tl.arange(0, num)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    stride = width * 2 if function == _SWIGLU else width
    place = row[:, None] * stride + column[None, :]
    value = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
    if function == _SWIGLU:
        up = tl.load(rows + place + width, mask=inside, other=0.0).to(tl.float32)
        value = value * _sigmoid(value) * up
    elif function == _GELU:
        value = value * _normal_share(value)
    if weights is not None:
        value *= tl.load(weights + row, mask=row < num_rows, other=0.0).to(tl.float32)[:, None]
    target = hidden + row[:, None] * width + column[None, :]
    tl.store(target, value.to(hidden.dtype.element_ty), mask=inside)


def activation_gradients(
    gradient: Tensor, rows: Tensor, weights: Tensor | None, function: str, with_hidden: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    for_rows = torch.empty_like(rows)
    for_weights = None if weights is None else torch.empty_like(weights)
    hidden = torch.empty_like(gradient) if with_hidden else None
    with on_device_of(rows):
        _activation_gradients[(triton.cdiv(len(rows), _ROWS),)](
            gradient, rows, weights, for_rows, for_weights, hidden, len(rows), gradient.shape[1],
            function=_FUNCTIONS[function], num=_ROWS, columns=_COLUMNS, num_warps=4,
        )  # fmt: skip
    return for_rows, for_weights, hidden


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _activation_gradients(  # type: ignore[no-untyped-def]
    gradient, rows, weights, for_rows, for_weights, hidden, num_rows, width,
    function: tl.constexpr, num: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * num + tl.arange(0, num)
    stride = width * 2 if function == _SWIGLU else width
    weight_gradient = tl.zeros([num], dtype=tl.float32)
    if weights is not None:
        weight = tl.load(weights + row, mask=row < num_rows, other=0.0).to(tl.float32)
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        place = row[:, None] * stride + column[None, :]
        narrow = row[:, None] * width + column[None, :]
        arriving = tl.load(gradient + narrow, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
        scaled = arriving
        if weights is not None:
            scaled = arriving * weight[:, None]
        if function == _SWIGLU:
            up = tl.load(rows + place + width, mask=inside, other=0.0).to(tl.float32)
            share = _sigmoid(value)
            activated = value * share * up
            passed = scaled * up * share * (1.0 + value * (1.0 - share))
            up_gradient = scaled * value * share
            tl.store(for_rows + place + width, up_gradient.to(for_rows.dtype.element_ty), mask=inside)
        elif function == _GELU:
            share = _normal_share(value)
            activated = value * share
            passed = scaled * (share + value * 0.3989422804014327 * tl.exp(-0.5 * value * value))
        else:
            activated = value
            passed = scaled
        tl.store(for_rows + place, passed.to(for_rows.dtype.element_ty), mask=inside)
        if weights is not None:
            weight_gradient += tl.sum(arriving * activated, axis=1)
            activated *= weight[:, None]
        if hidden is not None:
            tl.store(hidden + narrow, activated.to(hidden.dtype.element_ty), mask=inside)
    if weights is not None:
        tl.store(for_weights + row, weight_gradient.to(for_weights.dtype.element_ty), mask=row < num_rows)


@triton.jit
def _sigmoid(value):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-value))


@triton.jit
def _normal_share(value):  # type: ignore[no-untyped-def]
    """Return the share of a normal distribution below `value`."""
    return 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))


def clear_tail(rows: Tensor, ends: Tensor) -> None:
    """Write 0 into rows that belong to no expert."""
    grid = (triton.cdiv(len(rows), _CLEARED_ROWS),)
    with on_device_of(rows):
        _clear_tail[grid](
            rows, ends, len(rows), rows.shape[1], len(ends),
            num=_CLEARED_ROWS, columns=_COLUMNS, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _clear_tail(  # type: ignore[no-untyped-def]
    rows, ends, num_rows, width, experts, num: tl.constexpr, columns: tl.constexpr
):
    last = tl.load(ends + experts - 1)
    first = tl.program_id(0).to(tl.int64) * num
    if first + num > last:
        row = first + tl.arange(0, num)
        for start in range(0, width, columns):
            column = start + tl.arange(0, columns)
            cleared = ((row >= last) & (row < num_rows))[:, None] & (column < width)[None, :]
            zeros = tl.zeros([num, columns], dtype=rows.dtype.element_ty)
            tl.store(rows + row[:, None] * width + column[None, :], zeros, mask=cleared)


def clear_empty(products: Tensor, ends: Tensor) -> None:
    """Write 0 into the matrices [experts, m, n] of experts without rows."""
    size = products[0].numel()
    with on_device_of(products):
        _clear_empty[(len(products), _CLEARING_PROGRAMS)](
            products, ends, size, programs=_CLEARING_PROGRAMS, tile=_CLEARED_ELEMENTS, num_warps=4
        )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _clear_empty(products, ends, size, programs: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.program_id(0)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if begin == tl.load(ends + expert):
        target = products + expert.to(tl.int64) * size
        for start in range(tl.program_id(1) * tile, size, programs * tile):
            place = start + tl.arange(0, tile)
            tl.store(target + place, tl.zeros([tile], dtype=products.dtype.element_ty), mask=place < size)


# Grouped products, where torch has none that stays on the device: float16, float32, and sizes that its own
# does not take.
#
#     multiply    a program has a tile of the rows of one expert, times some columns of its matrix
#     outer       a program has a tile of the product of one expert, and goes through its rows


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
