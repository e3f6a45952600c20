"""Stochastic rounding of float32 to bf16: up or down at random, so that the mean is the value itself.

A bf16 number is the upper half of a float32. To add 16 random bits to the lower half, and to cut it off,
rounds up with the probability that makes the mean exact:

    float32   0 10000000 1001001|0000111111011011      the lower half is 0.06 of the step to the next bf16
    noise                        1111010010110010      carries into the upper half in 6 % of all draws

What bf16 can hold stays as it is, and so do infinities and what is not a number. The noise of an element is a
hash of a key and of its index in the whole parameter (hashing.py): it does not depend on the plan. Each hash
serves four neighbouring elements. `rounding_kernel` computes the same in one pass on a CUDA device.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives.buffer_layout import portions
from echelon.nn.hashing import WEYL, hash_of, mix_, signed
from echelon.state.ownership import LocalParameter, OwnedSlice
from echelon.update.numbers import Flag, Number
from echelon.update.precision.flat_memory import as_float32, flat_views, has_kernel, without_memory
from echelon.update.precision.stepper import LocalStepper, copy_all, takes_portions, with_gradients


class ElementRuns(NamedTuple):
    """Runs of `length` elements: where each begins in the flattened part, and in the flattened whole."""

    in_part: Tensor  # int64, on the part's device
    in_whole: Tensor
    length: int


def runs_of(boxes: Iterable[OwnedSlice], device: torch.device) -> list[ElementRuns]:
    """The runs of boxes of the whole, whose tensors are views of one flat part."""
    return [_runs(box, device) for box in boxes if box.slice.numel]


def whole_run(tensor: Tensor) -> ElementRuns:
    """Return the one run of a whole parameter."""
    begin = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    return ElementRuns(begin, begin, tensor.numel())


def _runs(box: OwnedSlice, device: torch.device) -> ElementRuns:
    """Elements are consecutive from the last dim on of which the box does not have all."""
    _, _, shape, offsets, sizes = box.slice
    cut = max((dim for dim, size in enumerate(sizes) if size < shape[dim]), default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    in_whole = first + _grid(sizes[:cut], strides[:cut])
    in_part = int(box.tensor.storage_offset()) + _grid(sizes[:cut], box.tensor.stride()[:cut])
    return ElementRuns(in_part.to(device), in_whole.to(device), math.prod(sizes[cut:]))


def _grid(sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The place of every index of outer dims, in order."""
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(sizes, strides, strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places


_PER_WORD = 4  # elements per hash
_QUIET_NAN = 0x00400000  # the highest bit of the fraction: it stays not a number without its lower half
_CPU_TILE, _GPU_TILE = 1 << 16, 1 << 22  # elements at a time, which bounds the memory beside the result


class Placement(NamedTuple):
    """Decides the noise of a tensor, beside seed and update: its parameter, and its elements."""

    name: int  # a hash
    runs: Sequence[ElementRuns]

    @classmethod
    def of(cls, name: str, runs: Sequence[ElementRuns]) -> "Placement":
        return cls(hash_of(*name.encode()), runs)


@final
class KeyedRounding:
    """Rounds weights after each update, with noise that seed, update, parameter and element decide."""

    def __init__(self, seed: int) -> None:
        self._seed, self._num_updates = seed, 0

    def start_update(self, number: int) -> None:
        """Begin update `number`, from 0. The engine counts: the number of calls depends on the plan."""
        self._num_updates = number + 1

    def round(self, weight: Tensor, value: Tensor, placement: Placement) -> None:
        """weight (bf16) = value (float32), rounded."""
        key = hash_of(self._seed, self._num_updates, placement.name)
        round_stochastically(weight, value, key, placement.runs)


@torch.no_grad()
def round_stochastically(weight: Tensor, value: Tensor, key: int, runs: Sequence[ElementRuns]) -> None:
    """weight (bf16) = value (float32), rounded. `runs`: where the elements lie in the whole parameter; those
    that are in none (padding) are rounded to the nearest."""
    source = value.reshape(-1)  # a copy, if it lies in another order
    target = weight.view(-1) if weight.is_contiguous() else torch.empty_like(source, dtype=weight.dtype)
    if sum(len(each.in_part) * each.length for each in runs) < len(source):
        target.copy_(source)
    for each in runs:
        if has_kernel(source):
            from echelon.update.precision.rounding_kernel import round_runs

            round_runs(target, source, key, each)
        else:
            _round(target, source, key, each)
    if not weight.is_contiguous():
        weight.copy_(target.view(weight.shape))


def _round(target: Tensor, source: Tensor, key: int, runs: ElementRuns) -> None:
    for tile in _tiles(runs, source.device):
        places = tile.in_part[:, None] + torch.arange(tile.length, device=source.device)
        values = source[places]
        bits = values.view(torch.int32)
        rounded = torch.where(values.isnan(), bits | _QUIET_NAN, bits + _noise(key, tile)) >> 16
        target[places] = rounded.to(torch.int16).view(torch.bfloat16)


def _noise(key: int, runs: ElementRuns) -> Tensor:
    """16 random bits for each element of some runs, [runs, length]."""
    device = runs.in_whole.device
    num_words = -(-(runs.length + _PER_WORD - 1) // _PER_WORD)  # the first may begin before the run
    words = (runs.in_whole // _PER_WORD)[:, None] + torch.arange(num_words, device=device)
    hashes = mix_(words.mul_(signed(WEYL)).add_(signed(key)))
    elements = (runs.in_whole % _PER_WORD)[:, None] + torch.arange(runs.length, device=device)
    return hashes.view(torch.int16).gather(1, elements).int().bitwise_and_(0xFFFF)


def _tiles(runs: ElementRuns, device: torch.device) -> Iterator[ElementRuns]:
    """Parts of some whole runs, or of one if it is long."""
    tile = _CPU_TILE if device.type == "cpu" else _GPU_TILE
    for begin in range(0, runs.length, tile):
        length = min(tile, runs.length - begin)
        rows = max(1, tile // length)
        for top in range(0, len(runs.in_part), rows):
            chosen = slice(top, top + rows)
            yield ElementRuns(runs.in_part[chosen] + begin, runs.in_whole[chosen] + begin, length)


_PORTION = 64 * 2**20  # bytes of float32 copies, whatever the model's size; or those of one weight


@final
class RoundingStepper(LocalStepper):
    """The optimizer works on float32 copies of some weights at a time, which are then rounded."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        local: Sequence[LocalParameter],
        placements: Mapping[nn.Parameter, Placement],
        rounding: KeyedRounding,
        *,
        deferred: bool = False,
    ) -> None:
        """`placements`: of what is updated of each local parameter."""
        self._placements, self._rounding = placements, rounding
        self._copies = {each.tensor: nn.Parameter(without_memory(each.tensor)) for each in local}
        self._without_memory = {weight: copy.data for weight, copy in self._copies.items()}
        super().__init__(optimizer, local, deferred=deferred)

    def start_update(self, number: int) -> None:
        self._rounding.start_update(number)

    def step(self, factor: Number, skip: Flag = False, unit: Sequence[LocalParameter] | None = None) -> None:
        weights = with_gradients(self._local if unit is None else unit)
        if not takes_portions(self.optimizer):
            self._step(weights, factor, skip)
            return
        skip = self._call.readable(skip)
        for portion in portions(weights, lambda weight: weight.numel() * torch.float32.itemsize, _PORTION):
            self._step(portion, factor, skip)

    def _step(self, weights: Sequence[nn.Parameter], factor: Number, skip: Flag) -> None:
        copies = [self._copies[weight] for weight in weights]
        self._fill(weights, copies)
        for copy, gradient in zip(copies, as_float32(weights, copies), strict=True):
            copy.grad = gradient
        self._call(copies, factor, skip)
        for weight, copy in zip(weights, copies, strict=True):
            self._rounding.round(weight, copy, self._placements[weight])
            copy.grad = None
            copy.data = self._without_memory[weight]

    @torch.no_grad()
    def _fill(self, weights: Sequence[nn.Parameter], copies: Sequence[nn.Parameter]) -> None:
        memory = flat_views([weight.detach() for weight in weights], torch.float32)
        copy_all(memory, weights)
        for copy, view in zip(copies, memory, strict=True):
            copy.data = view

    def updated(self, local: LocalParameter) -> nn.Parameter:
        return self._copies[local.tensor]
