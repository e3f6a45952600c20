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
    part: tuple[int, int] | None = None,
) -> Tensor:
    """True where an element is kept, with probability 1 - p. Dim 0 of `shape` counts samples.

    Element j of sample s is decided by hash(seed, step, layer, use, first_sample + s, j), and by nothing
    else: however a batch is cut, its samples keep the same elements. `use` tells apart the uses of one layer.
    `places`: where along dim 1 of the whole sample the part of it stands that is here, if not all of it is.
    `part`: (1, 4) if the last dim is the second quarter of the whole one; with places, one behind dim 1.
    """
    samples, positions = shape[0], prod(shape[1:])
    if p == 0:
        return torch.ones(*shape, dtype=torch.bool, device=device)
    keys = _sample_keys(hash_of(seed, step, layer, use), first_sample, samples, device)
    numbers, words = _words(shape, places, part, device)
    kept = torch.empty(samples, len(words) * _PER_WORD, dtype=torch.bool, device=device)
    counters = words.mul_(_signed(_WEYL))
    rows = max(1, _TILE // max(1, len(words)))
    for begin in range(0, samples, rows):
        drawn = _mix_(keys[begin : begin + rows, None] + counters)
        torch.lt(drawn.view(torch.int32), _threshold(p), out=kept[begin : begin + rows])
    if numbers is not None:
        kept = _halves(kept, numbers)
    return kept[:, :positions].reshape(*shape)


def _words(
    shape: Sequence[int], places: Tensor | None, part: tuple[int, int] | None, device: torch.device | str
) -> tuple[Tensor | None, Tensor]:
    """The numbers of the hashes that decide the positions of a sample, in order.

    Before them the numbers of the positions, where every single one has a hash drawn for itself.
    """
    if places is None and part is None:
        return None, torch.arange(-(-prod(shape[1:]) // _PER_WORD), device=device)
    begins, length = _runs(shape, places, part, device)
    if length % _PER_WORD == 0:
        each = length // _PER_WORD
        return None, (begins[:, None] // _PER_WORD + torch.arange(each, device=device)).flatten()
    numbers = (begins[:, None] + torch.arange(length, device=device)).flatten()
    return numbers, numbers // _PER_WORD


def _runs(
    shape: Sequence[int], places: Tensor | None, part: tuple[int, int] | None, device: torch.device | str
) -> tuple[Tensor, int]:
    """Where in the whole sample the runs begin that are here, all at multiples of their length; and that."""
    if part is None:
        assert places is not None
        return places.to(device) * prod(shape[2:]), prod(shape[2:])
    which, parts = part
    if len(shape) == 2:
        return torch.tensor([which * shape[1]], device=device), shape[1]
    outer = torch.arange(shape[1], device=device) if places is None else places.to(device)
    inner = prod(shape[2:-1])
    rows = (outer[:, None] * inner + torch.arange(inner, device=device)).flatten()
    return (rows * parts + which) * shape[-1], shape[-1]


def _halves(kept: Tensor, numbers: Tensor) -> Tensor:
    """Of hashes that were drawn for every single position, the half that is the position's own."""
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
