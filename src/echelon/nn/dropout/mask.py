"""Which elements dropout keeps: a pure function of seed, step, layer, sample and position.

Each hash (hashing.py) serves two neighbouring elements, 32 bits each: probabilities are exact to 2⁻³².
`kernel` computes the same bits in one pass on a CUDA device.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.nn.hashing import WEYL, hash_of, mix_, signed

# Which elements of a sample are on this rank: runs of consecutive ones, all of one length.


class Runs(NamedTuple):
    """Run r begins, among the elements of the whole sample, at

        ((indices[r // inner] · inner + r % inner) · ranks + rank) · length

    where `indices` are those of dim 1 (0, 1, 2 … if all of it is here). Every begin is a multiple of the
    length.
    """

    num_runs: int
    length: int
    inner: int = 1
    rank: int = 0
    ranks: int = 1

    @property
    def has_whole_words(self) -> bool:
        """Whether no hash of two neighbouring elements decides for two runs."""
        return self.length % 2 == 0


def runs_of(shape: Sequence[int], *, has_indices: bool, feature_part: tuple[int, int] | None) -> Runs:
    """The runs of a sample, for elements of `shape` whose dim 0 counts samples.

    runs_of((8, 5, 6), has_indices=True, feature_part=None)         # 5 runs of 6 elements
    """
    if feature_part is not None:
        assert len(shape) > 1, "the last dim counts features, and not samples"
        return Runs(prod(shape[1:-1]), shape[-1], prod(shape[2:-1]), *feature_part)
    return Runs(shape[1], prod(shape[2:])) if has_indices else Runs(1, prod(shape[1:]))


_BITS = 32  # bits of a hash that decide one element
_PER_WORD = 64 // _BITS

# Words hashed at a time, which bounds the memory beside the mask. On a CPU they fit a cache.
_CPU_TILE, _GPU_TILE = 1 << 16, 1 << 22


class Draw(NamedTuple):
    """What decides which elements are kept, beside the shape. Dim 0 of the shape counts samples.

    Element j of sample s is decided by hash(key, first_sample + s, j) and nothing else: a sample keeps the
    same elements however the batch is split.
    `indices`: the indices in the whole sample of dim 1, where a rank holds a part of it.
    `feature_part`: (1, 4) where the last dim is the second quarter of the whole one; together with
    `indices`, the last dim must not be dim 1.
    """

    key: int
    first_sample: int | Tensor
    p: float
    indices: Tensor | None = None
    feature_part: tuple[int, int] | None = None

    @property
    def scale(self) -> float:
        """What kept elements are multiplied by."""
        return 1.0 if self.p == 1 else 1 / (1 - self.p)

    def runs(self, shape: Sequence[int]) -> Runs:
        """The part of a whole sample that a tensor of this shape has."""
        return runs_of(shape, has_indices=self.indices is not None, feature_part=self.feature_part)


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
    """True where an element is kept, with probability 1 - p. `use` counts the uses of one layer."""
    key = hash_of(seed, step, layer, use)
    return mask_of(Draw(key, first_sample, p, indices, feature_part), shape, device)


def mask_of(draw: Draw, shape: Sequence[int], device: torch.device | str) -> Tensor:
    """True where an element is kept, with probability 1 - p."""
    if draw.p == 0:
        return torch.ones(*shape, dtype=torch.bool, device=device)
    keys = sample_keys(draw.key, draw.first_sample, shape[0], device)
    runs = draw.runs(shape)
    words, numbers = _words(runs, draw.indices, device)
    kept = torch.empty(len(keys), len(words) * _PER_WORD, dtype=torch.bool, device=device)
    counters = words.mul_(signed(WEYL))
    for rows, columns in _tiles(len(keys), len(words), kept.device):
        hashes = mix_(keys[rows, None] + counters[columns])
        halves = slice(columns.start * _PER_WORD, columns.stop * _PER_WORD)
        torch.lt(hashes.view(torch.int32), threshold(draw.p), out=kept[rows, halves])
    if numbers is not None:
        kept = _own_halves(kept, numbers)
    return kept[:, : runs.num_runs * runs.length].reshape(*shape)


def _tiles(rows: int, columns: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Parts of whole rows, or of one row if it is long."""
    tile = _CPU_TILE if device.type == "cpu" else _GPU_TILE
    width = max(1, min(columns, tile))
    height = tile // width
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield slice(top, top + height), slice(left, min(left + width, columns))


def _words(runs: Runs, indices: Tensor | None, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
    """The numbers of the hashes that decide the elements of a sample, in order.

    Where elements do not come in whole words, each has a hash of its own. Then the second result is the
    numbers of the elements.
    """
    if runs.num_runs == 1 and runs.rank == 0 and indices is None:
        return torch.arange(-(-runs.length // _PER_WORD), device=device), None
    begins = _begins(runs, indices, device)
    if runs.has_whole_words:
        in_run = torch.arange(runs.length // _PER_WORD, device=device)
        return (begins[:, None] // _PER_WORD + in_run).flatten(), None
    numbers = (begins[:, None] + torch.arange(runs.length, device=device)).flatten()
    return numbers // _PER_WORD, numbers


def _begins(runs: Runs, indices: Tensor | None, device: torch.device | str) -> Tensor:
    """Where each run begins in the whole sample."""
    number = torch.arange(runs.num_runs, device=device)
    outer = number // max(1, runs.inner)
    outer = outer if indices is None else indices.to(device)[outer]
    return ((outer * runs.inner + number % max(1, runs.inner)) * runs.ranks + runs.rank) * runs.length


def _own_halves(kept: Tensor, numbers: Tensor) -> Tensor:
    """The half of each hash that belongs to its element, where each element has a hash of its own."""
    halves = kept.view(len(kept), -1, _PER_WORD)
    return halves.gather(2, (numbers % _PER_WORD).expand(len(kept), -1)[..., None])[..., 0]


def sample_keys(key: int, first: int | Tensor, samples: int, device: torch.device | str) -> Tensor:
    """One key for each sample, from the number `first` of the global batch on."""
    numbers = torch.arange(samples, device=device).add_(first)
    return mix_(numbers.mul_(signed(WEYL)).add_(signed(key)))


def threshold(p: float) -> int:
    """A fraction 1 - p of all signed numbers of `_BITS` bits lies below it."""
    half = 1 << (_BITS - 1)
    return min(round((1 - p) * 2 * half) - half, half - 1)
