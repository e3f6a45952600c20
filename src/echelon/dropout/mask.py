"""Which elements dropout keeps: a pure function of seed, step, layer, sample and position.

splitmix64 hashes a counter, in int64 that wraps around, so that every device gives the same bits. Each hash
serves two neighbouring elements, 32 bits each: probabilities are exact to 2⁻³².
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_BITS = 32  # bits of a hash that decide one element
_PER_WORD = 64 // _BITS
_TILE = 1 << 22  # words hashed at a time: bounds the memory beside the mask

_WEYL = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shift right and xor, multiply
_ALL = (1 << 64) - 1


def keep_mask(
    seed: int,
    step: int,
    layer: int,
    first_sample: int | Tensor,
    shape: Sequence[int],
    p: float,
    device: torch.device | str = "cpu",
    use: int = 0,
    indices: Tensor | None = None,
    feature_part: tuple[int, int] | None = None,
) -> Tensor:
    """True where an element is kept, with probability 1 - p. Dim 0 of `shape` counts samples.

    Element j of sample s is decided by hash(seed, step, layer, use, first_sample + s, j) and nothing else:
    a sample keeps the same elements however the batch is split. `use` counts the uses of one layer.
    `indices`: the indices in the whole sample of dim 1, where a rank holds a part of it.
    `feature_part`: (1, 4) where the last dim is the second quarter of the whole one; together with
    `indices`, the last dim must not be dim 1.
    """
    samples, elements = shape[0], prod(shape[1:])
    if p == 0:
        return torch.ones(*shape, dtype=torch.bool, device=device)
    keys = _sample_keys(hash_of(seed, step, layer, use), first_sample, samples, device)
    words, numbers = _words(shape, indices, feature_part, device)
    kept = torch.empty(samples, len(words) * _PER_WORD, dtype=torch.bool, device=device)
    counters = words.mul_(_signed(_WEYL))
    rows = max(1, _TILE // max(1, len(words)))
    for begin in range(0, samples, rows):
        hashes = _mix_(keys[begin : begin + rows, None] + counters)
        torch.lt(hashes.view(torch.int32), _threshold(p), out=kept[begin : begin + rows])
    if numbers is not None:
        kept = _own_halves(kept, numbers)
    return kept[:, :elements].reshape(*shape)


def _words(
    shape: Sequence[int],
    indices: Tensor | None,
    feature_part: tuple[int, int] | None,
    device: torch.device | str,
) -> tuple[Tensor, Tensor | None]:
    """The numbers of the hashes that decide the elements of a sample, in order.

    Where elements do not come in whole words, each has a hash of its own. Then the second result is the
    numbers of the elements.
    """
    if indices is None and feature_part is None:
        return torch.arange(-(-prod(shape[1:]) // _PER_WORD), device=device), None
    begins, length = _runs(shape, indices, feature_part, device)
    if length % _PER_WORD == 0:
        in_run = torch.arange(length // _PER_WORD, device=device)
        return (begins[:, None] // _PER_WORD + in_run).flatten(), None
    numbers = (begins[:, None] + torch.arange(length, device=device)).flatten()
    return numbers // _PER_WORD, numbers


def _runs(
    shape: Sequence[int],
    indices: Tensor | None,
    feature_part: tuple[int, int] | None,
    device: torch.device | str,
) -> tuple[Tensor, int]:
    """The runs of consecutive elements that are here: where each begins in the whole sample, and the length
    of all. Every begin is a multiple of the length."""
    if feature_part is None:
        assert indices is not None
        return indices.to(device) * prod(shape[2:]), prod(shape[2:])
    rank, ranks = feature_part
    if len(shape) == 2:
        return torch.full((1,), rank * shape[1], device=device), shape[1]
    outer = torch.arange(shape[1], device=device) if indices is None else indices.to(device)
    inner = prod(shape[2:-1])
    rows = (outer[:, None] * inner + torch.arange(inner, device=device)).flatten()
    return (rows * ranks + rank) * shape[-1], shape[-1]


def _own_halves(kept: Tensor, numbers: Tensor) -> Tensor:
    """The half of each hash that belongs to its element, where each element has a hash of its own."""
    halves = kept.view(len(kept), -1, _PER_WORD)
    return halves.gather(2, (numbers % _PER_WORD).expand(len(kept), -1)[..., None])[..., 0]


def hash_of(*numbers: int) -> int:
    """A hash of 64 bits of integers of any size and sign; their order matters."""
    state = 0
    for number in numbers:
        state = _mix(state + number + _WEYL)
    return state


def _sample_keys(key: int, first: int | Tensor, samples: int, device: torch.device | str) -> Tensor:
    numbers = torch.arange(samples, device=device).add_(first)
    return _mix_(numbers.mul_(_signed(_WEYL)).add_(_signed(key)))


def _threshold(p: float) -> int:
    """A fraction 1 - p of all signed numbers of `_BITS` bits lies below it."""
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
        # The shift of an int64 copies its sign; the mask removes the copies.
        numbers ^= (numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            numbers *= _signed(factor)
    return numbers


def _signed(number: int) -> int:
    """The int64 of the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number
