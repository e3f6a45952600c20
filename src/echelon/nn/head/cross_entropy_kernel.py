"""The losses of rows of logits and their gradient in place, as a Triton kernel: one program per row.

It reads a row twice and writes it once. Import this only where Triton is installed.
"""

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.nn.triton_support import on_device_of

_TILE = 4096  # columns at a time
_WARPS = 4


def lose(logits: Tensor, targets: Tensor, ignored: int, losses: Tensor, *, with_gradient: bool) -> None:
    """Write the loss of each row of logits [tokens, columns], and the gradient in place of the logits."""
    targets = targets.contiguous()
    with on_device_of(logits):
        _lose[(len(logits),)](
            logits,
            targets,
            losses,
            logits.stride(0),
            logits.shape[1],
            ignored,
            with_gradient=with_gradient,
            tile_size=_TILE,
            num_warps=_WARPS,
        )


@triton.jit(do_not_specialize=["ignored"])  # type: ignore[untyped-decorator, unused-ignore]
def _lose(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    stride,
    num_columns,
    ignored,
    with_gradient: tl.constexpr,
    tile_size: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    target = tl.load(targets + token)
    counted = target != ignored
    chosen = tl.load(row + tl.where(counted, target, 0)).to(tl.float32)
    largest = -float("inf")
    total = 0.0
    for begin in range(0, num_columns, tile_size):
        columns = begin + tl.arange(0, tile_size)
        tile = tl.load(row + columns, mask=columns < num_columns, other=-float("inf")).to(tl.float32)
        # Sums of before are of powers less the largest of before. Where all was −inf there is none.
        larger = tl.maximum(largest, tl.max(tile))
        shift = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(tile - shift))
        largest = larger
    log_sum = largest + tl.log(total)
    tl.store(losses + token, tl.where(counted, log_sum - chosen, 0.0))
    if with_gradient:
        for begin in range(0, num_columns, tile_size):
            columns = begin + tl.arange(0, tile_size)
            inside = columns < num_columns
            tile = tl.load(row + columns, mask=inside, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(tile - log_sum) - tl.where(columns == target, 1.0, 0.0)
            gradient = tl.where(counted, gradient, 0.0)
            tl.store(row + columns, gradient.to(logits.dtype.element_ty), mask=inside)
