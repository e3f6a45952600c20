"""Triton kernels of gates: the choice of experts, and sums for their statistics.

Import this only where Triton is installed.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.nn.triton_support import on_device_of

_CHOSEN_ELEMENTS = 4096  # scores in a program
_LEAST = tl.constexpr(-(2**62))  # below all keys of scores


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the columns of the `count` largest of each row, as a stable sort has them."""
    num_rows, width = scores.shape
    indices = torch.empty(num_rows, count, dtype=torch.int64, device=scores.device)
    columns = triton.next_power_of_2(width)
    num = max(1, _CHOSEN_ELEMENTS // columns)
    with on_device_of(scores):
        _largest[(triton.cdiv(num_rows, num),)](
            scores, indices, num_rows, width, k=count, num=num, columns=columns, num_warps=4
        )
    return indices


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _largest(  # type: ignore[no-untyped-def]
    scores, indices, num_rows, width, k: tl.constexpr, num: tl.constexpr, columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * num + tl.arange(0, num)
    column = tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    score = tl.load(scores + row[:, None] * width + column[None, :], mask=inside, other=0.0)
    key = tl.where(inside, _keys(score, column, columns), _LEAST)
    for place in tl.static_range(k):
        best = tl.max(key, axis=1)
        tl.store(indices + row * k + place, columns - 1 - (best & 65535), mask=row < num_rows)
        key = tl.where(key != best[:, None], key, _LEAST)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keys(score, column, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return integers in the order of the scores of each row, of which no two are equal."""
    # Bits of floats as integers in the same order: -0 is 0, and what is no number is the largest.
    bits = tl.where(score != 0.0, score, 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(score == score, bits, 0x7FFFFFFF)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int64) * 65536 + (columns - 1 - column)[None, :]  # of equal scores the first is larger


def top_softmax(logits: Tensor, count: int, normalize: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, and of the `count` largest of each row columns and weights."""
    num_rows, width = logits.shape
    probabilities = torch.empty_like(logits)
    indices = torch.empty(num_rows, count, dtype=torch.int64, device=logits.device)
    weights = logits.new_empty(num_rows, count)
    columns = triton.next_power_of_2(width)
    num = max(1, _CHOSEN_ELEMENTS // columns)
    with on_device_of(logits):
        _top_softmax[(triton.cdiv(num_rows, num),)](
            logits, probabilities, indices, weights, num_rows, width, k=count,
            slots=triton.next_power_of_2(count), normalize=normalize, num=num, columns=columns, num_warps=4,
        )  # fmt: skip
    return probabilities, indices, weights


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _top_softmax(  # type: ignore[no-untyped-def]
    logits, probabilities, indices, weights, num_rows, width,
    k: tl.constexpr, slots: tl.constexpr, normalize: tl.constexpr, num: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * num + tl.arange(0, num)
    column = tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    logit = tl.load(logits + place, mask=inside, other=0.0)
    below = tl.where((column < width)[None, :], logit, float("-inf"))
    power = tl.exp(below - tl.max(below, axis=1)[:, None])
    probability = power / tl.sum(power, axis=1)[:, None]
    tl.store(probabilities + place, probability, mask=inside)
    key = tl.where((column < width)[None, :], _keys(probability, column, columns), _LEAST)
    slot = tl.arange(0, slots)
    weight = tl.zeros([num, slots], dtype=tl.float32)
    for choice in tl.static_range(k):
        best = tl.max(key, axis=1)
        tl.store(indices + row * k + choice, columns - 1 - (best & 65535), mask=row < num_rows)
        value = (best >> 16).to(tl.int32).to(tl.float32, bitcast=True)
        weight = tl.where((slot != choice)[None, :], weight, value[:, None])
        key = tl.where(key != best[:, None], key, _LEAST)
    if normalize:
        weight = weight / tl.sum(weight, axis=1)[:, None]
    chosen = (row < num_rows)[:, None] & (slot < k)[None, :]
    tl.store(weights + row[:, None] * k + slot[None, :], weight, mask=chosen)


def top_softmax_gradient(
    for_probabilities: Tensor | None,
    for_weights: Tensor | None,
    probabilities: Tensor,
    indices: Tensor,
    weights: Tensor,
    normalize: bool,
) -> Tensor:
    """Return the gradient of logits; `for_…`: those of probabilities and weights."""
    (num_rows, width), k = probabilities.shape, indices.shape[1]
    gradient = torch.empty_like(probabilities)
    columns = triton.next_power_of_2(width)
    num = max(1, _CHOSEN_ELEMENTS // columns)
    with on_device_of(probabilities):
        _top_softmax_gradient[(triton.cdiv(num_rows, num),)](
            for_probabilities, for_weights, probabilities, indices, weights, gradient, num_rows, width,
            k=k, normalize=normalize, num=num, columns=columns, num_warps=4,
        )  # fmt: skip
    return gradient


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _top_softmax_gradient(  # type: ignore[no-untyped-def]
    for_probabilities, for_weights, probabilities, indices, weights, gradient, num_rows, width,
    k: tl.constexpr, normalize: tl.constexpr, num: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * num + tl.arange(0, num)
    column = tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    probability = tl.load(probabilities + place, mask=inside, other=0.0)
    arriving = tl.zeros([num, columns], dtype=tl.float32)
    if for_probabilities is not None:
        arriving += tl.load(for_probabilities + place, mask=inside, other=0.0)
    if for_weights is not None:
        mean = tl.zeros([num], dtype=tl.float32)
        total = tl.zeros([num], dtype=tl.float32)
        if normalize:
            for slot in tl.static_range(k):
                of_slot = row * k + slot
                weight = tl.load(weights + of_slot, mask=row < num_rows, other=0.0)
                index = tl.load(indices + of_slot, mask=row < num_rows, other=0)
                mean += weight * tl.load(for_weights + of_slot, mask=row < num_rows, other=0.0)
                total += tl.sum(tl.where(index[:, None] == column[None, :], probability, 0.0), axis=1)
            total = tl.where(row < num_rows, total, 1.0)
        else:
            total += 1.0
        for slot in tl.static_range(k):
            of_slot = row * k + slot
            index = tl.load(indices + of_slot, mask=row < num_rows, other=0)
            of_weight = tl.load(for_weights + of_slot, mask=row < num_rows, other=0.0)
            share = ((of_weight - mean) / total)[:, None]
            arriving = tl.where(index[:, None] != column[None, :], arriving, arriving + share)
    mean_gradient = tl.sum(probability * arriving, axis=1)[:, None]
    tl.store(gradient + place, probability * (arriving - mean_gradient), mask=inside)


def statistics(indices: Tensor, probabilities: Tensor, logits: Tensor) -> Tensor:
    """Return two rows [2, experts]: how many slots of `indices` [tokens, k] each expert has, and its share in
    the entropy of `probabilities` [tokens, experts], which is no number where a logit is none."""
    (num_rows, k), width = indices.shape, logits.shape[1]
    columns = triton.next_power_of_2(width)
    num = max(1, _CHOSEN_ELEMENTS // columns)
    portions = triton.cdiv(num_rows, num)
    sums = torch.empty(portions, 2, width, dtype=torch.float32, device=logits.device)
    with on_device_of(logits):
        _statistics[(portions,)](
            indices, probabilities, logits, sums, num_rows, width, k=k, num=num, columns=columns, num_warps=4
        )
    return sums.sum(0)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator, unused-ignore]
def _statistics(  # type: ignore[no-untyped-def]
    indices, probabilities, logits, sums, num_rows, width,
    k: tl.constexpr, num: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * num + tl.arange(0, num)
    column = tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    probability = tl.load(probabilities + place, mask=inside, other=0.0)
    logit = tl.load(logits + place, mask=inside, other=0.0)
    entropy = -probability * tl.log(tl.where(probability > 0.0, probability, 1.0))
    entropy += logit * 0.0  # no number, if the logit is none or infinite
    count = tl.zeros([num, columns], dtype=tl.float32)
    for slot in tl.static_range(k):
        index = tl.load(indices + row * k + slot, mask=row < num_rows, other=-1)
        count += (index[:, None] == column[None, :]).to(tl.float32)
    target = sums + tl.program_id(0) * 2 * width + column
    tl.store(target, tl.sum(count, axis=0), mask=column < width)
    tl.store(target + width, tl.sum(entropy, axis=0), mask=column < width)
