"""Which elements dropout keeps: a pure function of seed, step, layer, sample and position.

A counter is hashed by splitmix64, in int64 that wraps around, so that every device gives the same bits.
Each hash serves two neighbouring positions, 32 bits each: a probability is met to 2⁻³².
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_BITS = 32  # of a hash, for one element
_PER_WORD = 64 // _BITS
_TILE = 1 << 22  # words hashed at a time: bounds the memory that is needed beside the mask

_WEYL = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shift right and xor, multiply
_ALL = (1 << 64) - 1


def keep_mask(
    seed: int,
    step: int,
    layer: int,
    first_sample: int,
    shape: Sequence[int],
    p: float,
    device: torch.device | str = "cpu",
    use: int = 0,
    places: Tensor | None = None,
) -> Tensor:
    """True where an element is kept, with probability 1 - p. Dim 0 of `shape` counts samples.

    Element j of sample s is decided by hash(seed, step, layer, use, first_sample + s, j), and by nothing
    else: however a batch is cut, its samples keep the same elements. `use` tells apart the uses of one layer.
    `places`: where along dim 1 of the whole sample the part of it stands that is here, if not all of it is.
    """
    samples, positions = shape[0], prod(shape[1:])
    if p == 0:
        return torch.ones(*shape, dtype=torch.bool, device=device)
    keys = _sample_keys(hash_of(seed, step, layer, use), first_sample, samples, device)
    words = _words(positions, shape, places, device)
    kept = torch.empty(samples, len(words) * _PER_WORD, dtype=torch.bool, device=device)
    counters = words.mul_(_signed(_WEYL))
    rows = max(1, _TILE // max(1, len(words)))
    for begin in range(0, samples, rows):
        drawn = _mix_(keys[begin : begin + rows, None] + counters)
        torch.lt(drawn.view(torch.int32), _threshold(p), out=kept[begin : begin + rows])
    if places is not None and prod(shape[2:]) % _PER_WORD:
        kept = _halves(kept, shape, places)
    return kept[:, :positions].reshape(*shape)


def _words(positions: int, shape: Sequence[int], places: Tensor | None, device: torch.device | str) -> Tensor:
    """The numbers of the hashes that decide the positions of a sample, in order."""
    if places is None:
        return torch.arange(-(-positions // _PER_WORD), device=device)
    inner = prod(shape[2:])  # positions at one place
    places = places.to(device)
    if inner % _PER_WORD == 0:
        each = inner // _PER_WORD
        return (places[:, None] * each + torch.arange(each, device=device)).flatten()
    return (places[:, None] * inner + torch.arange(inner, device=device)).flatten() // _PER_WORD


def _halves(kept: Tensor, shape: Sequence[int], places: Tensor) -> Tensor:
    """Of hashes that were drawn for every single position, the half that is the position's own."""
    inner = prod(shape[2:])
    places = places.to(kept.device)
    numbers = (places[:, None] * inner + torch.arange(inner, device=kept.device)).flatten()
    both = kept.view(len(kept), -1, _PER_WORD)
    return both.gather(2, (numbers % _PER_WORD).expand(len(kept), -1)[..., None])[..., 0]


def hash_of(*numbers: int) -> int:
    """64 bits of whole numbers, in their order; any size and sign."""
    state = 0
    for number in numbers:
        state = _mix(state + number + _WEYL)
    return state


def _sample_keys(key: int, first: int, samples: int, device: torch.device | str) -> Tensor:
    return _mix_(torch.arange(first, first + samples, device=device).mul_(_signed(_WEYL)).add_(_signed(key)))


def _threshold(p: float) -> int:
    """Signed numbers of `_BITS` bits below it are a part 1 - p of all."""
    half = 1 << (_BITS - 1)
    return min(round((1 - p) * 2 * half) - half, half - 1)


def _mix(number: int) -> int:
    number &= _ALL
    for shift, factor in _ROUNDS:
        number ^= number >> shift
        number = number * factor & _ALL
    return number


def _mix_(numbers: Tensor) -> Tensor:
    """`_mix` of every element, in place."""
    for shift, factor in _ROUNDS:
        # An int64 is shifted with its sign, which the mask takes away again.
        numbers ^= (numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            numbers *= _signed(factor)
    return numbers


def _signed(number: int) -> int:
    """The int64 of the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number
