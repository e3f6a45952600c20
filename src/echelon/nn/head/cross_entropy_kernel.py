"""The losses of rows of logits and their gradient in place, as a Triton kernel: one program per row.

It reads a row twice and writes it once; with other ranks' parts of the vocabulary their message is between
the two. Import this only where Triton is installed.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.nn.losses import VocabularyPart
from echelon.nn.triton_support import on_device_of

_TILE = 4096  # columns at a time
_WARPS = 4


def lose(
    logits: Tensor,
    words: int,
    targets: Tensor,
    ignored: int,
    losses: Tensor,
    part: VocabularyPart | None = None,
    smoothing: float = 0.0,
    *,
    with_gradient: bool,
) -> None:
    """Write the loss of each row of logits [tokens, columns], and the gradient in place of the logits. The
    first columns are words, the others −inf: of a multiple of 16 Triton reads 16 bytes at a time."""
    targets = targets.contiguous()
    sizes = (logits.stride(0), logits.shape[1], ignored)
    options = {"tile_size": _TILE, "num_warps": _WARPS}
    grid = (len(logits),)
    with on_device_of(logits):
        if part is None:
            arguments = (logits, targets, losses, *sizes, words, 1.0 - smoothing, smoothing / words)
            _lose[grid](*arguments, smooths=smoothing > 0, with_gradient=with_gradient, **options)
            return
        numbers = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
        _add_up[grid](logits, targets, numbers[0], numbers[1], *sizes, part.begin, words, **options)
        log_sums, chosen = part.combine(numbers)
        losses.copy_((log_sums - chosen).masked_fill(targets == ignored, 0))
        if with_gradient:
            _differentiate[grid](logits, targets, log_sums, *sizes, part.begin, words, **options)


@triton.jit(do_not_specialize=["ignored", "words"])  # type: ignore[untyped-decorator, unused-ignore]
def _lose(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    stride,
    num_columns,
    ignored,
    words,
    kept,
    spread,
    smooths: tl.constexpr,
    with_gradient: tl.constexpr,
    tile_size: tl.constexpr,
):
    """The target has the weight `kept`, and each column `spread` beside it: label smoothing."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    target = tl.load(targets + token)
    counted = target != ignored
    chosen = tl.load(row + tl.where(counted, target, 0)).to(tl.float32)
    log_sum = _log_sum(row, num_columns, tile_size)
    if smooths:
        chosen = kept * chosen + spread * _sum(row, words, tile_size)
    tl.store(losses + token, tl.where(counted, log_sum - chosen, 0.0))
    if with_gradient:
        _write_gradient(row, log_sum, target, counted, kept, spread, words, num_columns, tile_size)


@triton.jit(do_not_specialize=["ignored", "begin", "words"])  # type: ignore[untyped-decorator, unused-ignore]
def _add_up(  # type: ignore[no-untyped-def]
    logits,
    targets,
    log_sums,
    chosen_logits,
    stride,
    num_columns,
    ignored,
    begin,
    words,
    tile_size: tl.constexpr,
):
    """Write what ranks tell each other of their columns, which begin at `begin`."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    target = tl.load(targets + token)
    column = target - begin
    is_here = (target != ignored) & (column >= 0) & (column < words)
    chosen = tl.load(row + tl.where(is_here, column, 0)).to(tl.float32)
    tl.store(chosen_logits + token, tl.where(is_here, chosen, 0.0))
    tl.store(log_sums + token, _log_sum(row, num_columns, tile_size))


@triton.jit(do_not_specialize=["ignored", "begin", "words"])  # type: ignore[untyped-decorator, unused-ignore]
def _differentiate(  # type: ignore[no-untyped-def]
    logits,
    targets,
    log_sums,
    stride,
    num_columns,
    ignored,
    begin,
    words,
    tile_size: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + token)
    log_sum = tl.load(log_sums + token)
    counted = target != ignored
    row = logits + token * stride
    column = tl.where(target - begin < words, target - begin, -1)
    _write_gradient(row, log_sum, column, counted, 1.0, 0.0, words, num_columns, tile_size)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _log_sum(row, num_columns, tile_size: tl.constexpr):  # type: ignore[no-untyped-def]
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
    return largest + tl.log(total)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum(row, words, tile_size: tl.constexpr):  # type: ignore[no-untyped-def]
    total = 0.0
    for begin in range(0, words, tile_size):
        columns = begin + tl.arange(0, tile_size)
        total += tl.sum(tl.load(row + columns, mask=columns < words, other=0.0).to(tl.float32))
    return total


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_gradient(  # type: ignore[no-untyped-def]
    row, log_sum, column, counted, kept, spread, words, num_columns, tile_size: tl.constexpr
):
    for begin in range(0, num_columns, tile_size):
        columns = begin + tl.arange(0, tile_size)
        inside = columns < num_columns
        tile = tl.load(row + columns, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = tl.exp(tile - log_sum) - tl.where(columns < words, spread, 0.0)
        gradient -= tl.where(columns == column, kept, 0.0)
        gradient = tl.where(counted, gradient, 0.0)
        tl.store(row + columns, gradient.to(row.dtype.element_ty), mask=inside)
