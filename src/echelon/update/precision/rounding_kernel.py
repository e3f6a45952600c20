"""Stochastic rounding in one pass on a CUDA device: a Triton kernel hashes, adds and cuts off.

Each program does one tile of one run. Words are hashed once for four elements, and the first word of a run
may begin before it:

    run        ├──────── length ────────┤
    words    ┊0 1 2 3┊4 5 6 7┊8 9 10 11┊
    programs └─── tile 0 ───┘└─ tile 1 …

Import this only where Triton is installed.
"""

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from echelon.nn.dropout.kernel import mix
from echelon.nn.hashing import WEYL, signed
from echelon.update.precision.rounding import ElementRuns

_MOST_WORDS = 512  # of a tile
_WARPS = 4  # for a tile of `_MOST_WORDS`
_MOST_PROGRAMS = 2**31 - 1  # a limit of CUDA for the first dim of a grid

_WEYL = tl.constexpr(WEYL)


def round_runs(target: Tensor, source: Tensor, key: int, runs: ElementRuns) -> None:
    """The elements of `runs`: target (bf16) = source (float32), rounded; both are flat."""
    num_words = (runs.length + 6) // 4  # in plain numbers: Triton's functions take the host longer
    words = min(_MOST_WORDS, 1 << (num_words - 1).bit_length())
    num_tiles = -(-num_words // words)
    assert len(runs.in_part) * num_tiles <= _MOST_PROGRAMS
    with torch.cuda.device(source.device) if source.is_cuda else torch.no_grad():
        _round[(len(runs.in_part) * num_tiles,)](
            target.view(torch.int16),
            source.view(torch.int32),
            signed(key),
            runs.in_part,
            runs.in_whole,
            runs.length,
            num_tiles,
            words=words,
            num_warps=max(1, _WARPS * words // _MOST_WORDS),
        )


# What changes from call to call is not specialized: Triton would compile again.
@triton.jit(do_not_specialize=["key", "length", "num_tiles"])  # type: ignore[untyped-decorator, unused-ignore]
def _round(  # type: ignore[no-untyped-def]
    target, source, key, in_part, in_whole, length, num_tiles, words: tl.constexpr
):
    program = tl.program_id(0)
    run, tile = program // num_tiles, program % num_tiles
    begin = tl.load(in_whole + run).to(tl.int64)
    first_word = (begin >> 2) + tile.to(tl.int64) * words
    counters = (first_word + tl.arange(0, words).to(tl.int64)).to(tl.uint64) * _WEYL
    hashes = mix(key.to(tl.int64).to(tl.uint64) + counters)
    even = tl.interleave(hashes.to(tl.int32), (hashes >> 32).to(tl.int32))
    noise = tl.interleave(even & 0xFFFF, (even >> 16) & 0xFFFF)

    offsets = tile.to(tl.int64) * (4 * words) + tl.arange(0, 4 * words).to(tl.int64) - (begin & 3)
    inside = (offsets >= 0) & (offsets < length)
    start = tl.load(in_part + run).to(tl.int64)
    bits = tl.load(source + start + offsets, mask=inside)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = tl.where(is_nan, bits | 0x00400000, bits + noise) >> 16
    tl.store(target + start + offsets, rounded.to(tl.int16), mask=inside)
