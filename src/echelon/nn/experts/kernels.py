"""Triton kernels of expert layers: what happens to rows; products are in `product_kernels.py`.

Each kernel reads and writes memory once, and adds up in float32. The number of rows changes from call to
call, so no kernel is compiled for one of them. Import this only where Triton is installed.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.nn.triton_support import on_device_of

_MOST_COLUMNS = 2048  # of a row, in a program
_ROWS, _COLUMNS = 16, 128  # of a tile of an activation
_CLEARED_ROWS, _CLEARED_ELEMENTS, _CLEARING_PROGRAMS = 64, 4096, 64

_NONE, _SWIGLU, _GELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FUNCTIONS = {"none": 0, "swiglu": 1, "gelu": 2}


def gather_rows(x: Tensor, inverse: Tensor, num_rows: int) -> Tensor:
    """Return the first `num_rows` of all sorted rows.

    Each token is read once, and written to the rows of its slots. To read in the order of rows would read it
    for each of them, from memory: caches do not hold all tokens.
    """
    (tokens, k), width = inverse.shape, x.shape[1]
    rows = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    columns = min(_MOST_COLUMNS, triton.next_power_of_2(width))
    with on_device_of(x):
        _gather_rows[(tokens, triton.cdiv(width, columns))](
            x, inverse, rows, num_rows, width, k=k, columns=columns, num_warps=4
        )
    return rows


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _gather_rows(  # type: ignore[no-untyped-def]
    x, inverse, rows, num_rows, width, k: tl.constexpr, columns: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    values = tl.load(x + token * width + column, mask=inside)
    for slot in tl.static_range(k):
        row = tl.load(inverse + token * k + slot)
        tl.store(rows + row * width + column, values, mask=inside & (row < num_rows))


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
