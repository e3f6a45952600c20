"""Keyed dropout in one pass on a CUDA device: a Triton kernel hashes, drops and scales.

It computes the bits of `mask` again whenever it is called, so no mask is stored. Each program does one tile
of one run:

    run        ├──────── length ────────┤      elements that are consecutive in the whole sample
    words    ┊ 0 1 ┊ 2 3 ┊ 4 5 ┊ 6 7 ┊         two elements per hash; the first may belong to the run before
    programs └── tile 0 ─┘└─ tile 1 ─┘

The grid has one dim, since CUDA allows few programs in a second one: all tiles of the first run, then of the
next.

Import this only where Triton is installed.
"""

import struct
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.nn.dropout.mask import Draw, threshold
from echelon.nn.hashing import ROUNDS, WEYL, signed_key
from echelon.nn.triton_support import on_device_of

_MOST_WORDS = 1024  # of a tile
_MOST_PROGRAMS = 2**31 - 1  # a limit of CUDA for the first dim of a grid
_MOST_ELEMENTS = 2**31 - 4 * _MOST_WORDS  # of a run: 32 bits count to the end of its last tile
_WARPS = 4  # for a tile of `_MOST_WORDS`

_WEYL = tl.constexpr(WEYL)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(shift) for shift, _ in ROUNDS)
_FACTOR_1, _FACTOR_2 = (tl.constexpr(factor) for _, factor in ROUNDS[:2])


def fits(shape: Sequence[int], draw: Draw) -> bool:
    """Return True if CUDA starts so many programs, and 32 bits count the elements of a run."""
    runs = draw.runs(shape)
    _, num_tiles = _tiles(runs.length)
    return runs.length <= _MOST_ELEMENTS and shape[0] * runs.num_runs * num_tiles <= _MOST_PROGRAMS


def _tiles(length: int) -> tuple[int, int]:
    """Return the words of a tile, and the tiles of a run of `length` elements.

    A run that begins in the middle of a word has an odd length, and no more words for that. Triton's own
    functions for this take the host some tens of times as long.
    """
    num_words = (length + 1) // 2
    words = min(_MOST_WORDS, 1 << (num_words - 1).bit_length())
    return words, -(-num_words // words)


def drop_into(output: Tensor, x: Tensor, draw: Draw) -> None:
    """Write x · mask / (1 - p) into `output`, both contiguous; they may be the same tensor."""
    runs = draw.runs(x.shape)
    words, num_tiles = _tiles(runs.length)
    grid = (len(x) * runs.num_runs * num_tiles,)
    first = draw.first_sample
    if isinstance(first, Tensor) and first.device != x.device:
        first = int(first)
    key = signed_key(draw.key)
    if isinstance(key, Tensor) and key.device != x.device:
        key = int(key)
    indices = None if draw.indices is None else draw.indices.to(x.device).contiguous()
    bits: int = struct.unpack("<q", struct.pack("<d", draw.scale))[0]
    with on_device_of(x):
        _drop[grid](
            *(output, x, key, first, indices, threshold(draw.p), bits, *runs, num_tiles),
            whole_words=runs.has_whole_words,
            is_double=x.dtype == torch.float64,
            key_on_device=isinstance(key, Tensor),
            first_on_device=isinstance(first, Tensor),
            words=words,
            num_warps=max(1, _WARPS * words // _MOST_WORDS),
        )


@triton.jit
def mix(number):  # type: ignore[no-untyped-def]
    """Hash unsigned numbers: splitmix64."""
    number ^= number >> _SHIFT_1
    number *= _FACTOR_1
    number ^= number >> _SHIFT_2
    number *= _FACTOR_2
    return number ^ (number >> _SHIFT_3)


# What changes from call to call is not specialized: Triton would compile again.
@triton.jit(do_not_specialize=["key", "first_sample", "threshold", "scale"])  # type: ignore[untyped-decorator, unused-ignore]
def _drop(  # type: ignore[no-untyped-def]
    output,
    x,
    key,
    first_sample,
    indices,
    threshold,
    scale,  # the bits of a double: a float argument would be rounded to 32 bits
    num_runs,
    length,
    inner,
    rank,
    ranks,
    num_tiles,
    whole_words: tl.constexpr,
    is_double: tl.constexpr,
    key_on_device: tl.constexpr,
    first_on_device: tl.constexpr,
    words: tl.constexpr,
):
    program = tl.program_id(0)
    row, tile = program // num_tiles, program % num_tiles
    run, sample = row % num_runs, row // num_runs
    first = tl.load(first_sample) if first_on_device else first_sample
    number = tl.load(key) if key_on_device else key
    sample_key = mix(_unsigned(number) + (_unsigned(first) + _unsigned(sample)) * _WEYL)

    outer = run // inner
    outer = outer.to(tl.int64) if indices is None else tl.load(indices + outer).to(tl.int64)
    begin = ((outer * inner + run % inner) * ranks + rank) * length
    first_word = (begin >> 1) + tile.to(tl.int64) * words
    counters = _unsigned(first_word) * _WEYL + tl.arange(0, words).to(tl.uint64) * _WEYL
    hashes = mix(sample_key + counters)
    bits = tl.interleave(hashes.to(tl.int32), (hashes >> 32).to(tl.int32))

    offsets = tile * (2 * words) + tl.arange(0, 2 * words)
    if whole_words:
        inside = offsets < length
    else:
        offsets -= (begin & 1).to(tl.int32)
        inside = (offsets >= 0) & (offsets < length)
    start = row.to(tl.int64) * length
    factor = scale.to(tl.int64).to(tl.float64, bitcast=True)
    if not is_double:
        factor = factor.to(tl.float32)
    values = tl.load(x + start + offsets, mask=inside).to(factor.dtype)
    # Times 0 and not just 0: what is not a number stays none, as in torch's dropout.
    tl.store(output + start + offsets, values * tl.where(bits < threshold, factor, 0.0), mask=inside)


@triton.jit
def _unsigned(number):  # type: ignore[no-untyped-def]
    """Return the same 64 bits; an argument may have come as 32 of them."""
    return number.to(tl.int64).to(tl.uint64)
