"""The kernel of fused_adam.py, over many tensors at once: a table says where they lie.

    rows        one per parameter: addresses of weight, master, both moments; its size
    gradients   the address of each parameter's gradient, by itself: a step may have made it elsewhere
    programs    one tile of one parameter each; `parameters` and `tiles` say which

Import this only where Triton is installed.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.update.precision.fused_adam import Element

_TILE = 512  # elements of a program: more in flight than with larger ones
_WARPS = 4
_COLUMNS = 5

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@final
class Table:
    """The addresses of the tensors of some elements, on the device. With a pair of integers for each tile it
    is large, and stays while gradients move."""

    def __init__(self, elements: Sequence[Element]) -> None:
        device = elements[0].master.device
        self.device = device
        sizes = [element.master.numel() for element in elements]
        rows = [
            [*(tensor.data_ptr() for tensor in (weight, master, mean, square)), size]
            for (weight, _, master, mean, square, _), size in zip(elements, sizes, strict=True)
        ]
        tiles = torch.tensor([triton.cdiv(size, _TILE) for size in sizes])
        numbers = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(tiles)
        firsts = (tiles.cumsum(0) - tiles).repeat_interleave(tiles)
        within = (torch.arange(len(numbers)) - firsts).int()
        self.rows = _upload(torch.tensor(rows, dtype=torch.int64), device)
        self.parameters, self.tiles = _upload(numbers, device), _upload(within, device)
        self.num_programs = len(numbers)
        self.weight_type, self.gradient_type = elements[0].weight.dtype, elements[0].gradient.dtype
        self.point_at([element.gradient for element in elements])

    def point_at(self, gradients: Sequence[Tensor]) -> None:
        """Take these gradients, of the same type, from the next update on."""
        addresses = torch.tensor([gradient.data_ptr() for gradient in gradients], dtype=torch.int64)
        self.gradients = _upload(addresses, self.device)


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True)


def update(table: Table, steps: Tensor, inverse: Tensor, skip: Tensor, group: dict[str, Any]) -> None:
    """`steps`: counters of the parameters, this update included; gradients are divided by `inverse`."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    step_sizes = (rate / (1 - beta1**steps)).float()
    corrections = (1 - beta2**steps).sqrt().float()
    is_decoupled = group.get("decoupled_weight_decay", False)
    with torch.cuda.device(table.device):
        _update[(table.num_programs,)](
            table.rows,
            table.gradients,
            table.parameters,
            table.tiles,
            step_sizes,
            corrections,
            inverse,
            skip,
            rate * group["weight_decay"] if is_decoupled else group["weight_decay"],
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            group["eps"],
            decoupled=is_decoupled,
            weight_type=_TYPES[table.weight_type],
            gradient_type=_TYPES[table.gradient_type],
            tile_size=_TILE,
            columns=_COLUMNS,
            num_warps=_WARPS,
        )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _pointer(row, column, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(row + column).to(tl.pointer_type(kind)), 16)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _update_tile(  # type: ignore[no-untyped-def]
    at,
    left,
    rates,
    decoupled: tl.constexpr,
    weight_type: tl.constexpr,
    size: tl.constexpr,
    masked: tl.constexpr,
):
    weight_at, gradient_at, master_at, mean_at, square_at = at
    factor, step_size, correction, decay, beta1, rest1, beta2, rest2, eps = rates
    places = tl.arange(0, size)
    inside = places < left if masked else None
    gradient = tl.load(gradient_at + places, mask=inside).to(tl.float32) * factor
    master = tl.load(master_at + places, mask=inside)
    mean = tl.load(mean_at + places, mask=inside)
    square = tl.load(square_at + places, mask=inside)
    if decoupled:
        master -= decay * master
    else:
        gradient += decay * master
    mean = beta1 * mean + rest1 * gradient
    square = beta2 * square + rest2 * gradient * gradient
    master -= step_size * mean / (tl.sqrt(square) * correction + eps)
    tl.store(master_at + places, master, mask=inside)
    tl.store(mean_at + places, mean, mask=inside)
    tl.store(square_at + places, square, mask=inside)
    tl.store(weight_at + places, master.to(weight_type), mask=inside)


# What changes from call to call is not specialized: Triton would compile again.
@triton.jit(do_not_specialize=["decay", "beta1", "rest1", "beta2", "rest2", "eps"])  # type: ignore[untyped-decorator, unused-ignore]
def _update(  # type: ignore[no-untyped-def]
    rows,
    gradients,
    parameters,
    tiles,
    step_sizes,
    corrections,
    inverse,
    skip,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decoupled: tl.constexpr,
    weight_type: tl.constexpr,
    gradient_type: tl.constexpr,
    tile_size: tl.constexpr,
    columns: tl.constexpr,
):
    if tl.load(skip) != 0:
        return
    program = tl.program_id(0)
    parameter = tl.load(parameters + program)
    row = rows + parameter * columns
    first = tl.load(tiles + program).to(tl.int64) * tile_size
    left = tl.load(row + columns - 1) - first
    at = (
        _pointer(row, 0, weight_type) + first,
        _pointer(gradients, parameter, gradient_type) + first,
        _pointer(row, 1, tl.float32) + first,
        _pointer(row, 2, tl.float32) + first,
        _pointer(row, 3, tl.float32) + first,
    )
    step_size, correction = tl.load(step_sizes + parameter), 1.0 / tl.load(corrections + parameter)
    rates = (1.0 / tl.load(inverse), step_size, correction, decay, beta1, rest1, beta2, rest2, eps)
    # Masks would have the kernel read one element at a time: only the last tile of a parameter has one.
    if left >= tile_size:
        _update_tile(at, left, rates, decoupled, weight_type, tile_size, False)
    else:
        _update_tile(at, left, rates, decoupled, weight_type, tile_size, True)
