"""recompute=budget:BYTES: which layers are recomputed, so that a rank keeps at most BYTES in the least time.

    budget 60; each layer saves 17 bytes, of which 1 is its input

    layers     [0   1] [2   3] [4]  5   6   7     kept: 3 inputs + 3 × 17 = 54
                        └───┴── computed again:         2 inputs + 33     = 35, layers 4 … 7 are gone

The choice is a shortest path over layers: a step keeps the next layer, or puts a run of the next layers into
a segment. A label is a set of steps that end at the same layer; of labels with about the same bytes only the
fastest goes on. Every label has its exact bytes, so a choice is never larger than it seems; it is the best
one up to 1 / `_LEVELS` of the budget.

Whether a segment fits depends on what the layers behind it keep, which is not known when it is chosen (but
in the one microbatch that is in its backward pass: that has let go of them). So the total is bounded first,
by `limit`, and limits are tried from the largest to the smallest, until none that is left can be faster.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Segments = tuple[tuple[int, int], ...]  # each from its first layer to before its last, in order


class LayerCost(NamedTuple):
    """One forward pass of one layer, measured."""

    saved: int  # bytes that autograd saves in it
    input: int  # bytes of its input
    seconds: float
    reused: int = 0  # bytes of what it saves that lie in its input
    shared: int = 0  # bytes of what it saves that the layer before saves too
    can_recompute: bool = True


class StageCosts(NamedTuple):
    """The layers of one stage, in order, and how many microbatches it keeps at once: before their backward
    pass, and between its halves. `outside`: bytes that each keeps from code around the layers."""

    layers: tuple[LayerCost, ...]
    in_flight: int
    waiting: int = 0
    outside: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are kept whatever is chosen."""
        between_halves = self.waiting * sum(layer.saved for layer in self.layers)
        return between_halves + (self.in_flight + self.waiting) * self.outside


class Choice(NamedTuple):
    """For each stage its segments; what they cost and take."""

    segments: tuple[Segments, ...]
    seconds: float  # of forward passes that are made again, in a microbatch
    peak: int  # bytes of the rank


def evaluate(stages: Sequence[StageCosts], segments: Sequence[Segments]) -> Choice:
    """Return a choice with its seconds and its peak of bytes."""
    kept = [_kept_bytes(stage.layers, chosen) for stage, chosen in zip(stages, segments, strict=True)]
    forward = sum(stage.in_flight * sum(each) for stage, each in zip(stages, kept, strict=True))
    forward += sum(stage.fixed_bytes for stage in stages)
    peak, seconds = forward, 0.0
    for stage, chosen, each in zip(stages, segments, kept, strict=True):
        total = sum(each)
        behind = [total, *(total - before for before in accumulate(each))]
        for begin, end in chosen:
            again = 0 if stage.waiting else recomputed_bytes(stage.layers, begin, end)  # else counted above
            peak = max(peak, forward - behind[end] + again)
            seconds += sum(layer.seconds for layer in stage.layers[begin:end])
    return Choice(tuple(segments), seconds, peak)


def recomputed_bytes(layers: Sequence[LayerCost], begin: int, end: int) -> int:
    """Return the bytes of a segment, beside its input, when it has been computed again."""
    inside = sum(layer.saved for layer in layers[begin:end])
    return inside - layers[begin].reused - sum(layer.shared for layer in layers[begin + 1 : end])


def uniform_choices(stages: Sequence[StageCosts], longest: int | None = None) -> Iterator[Choice]:
    """No segments; then every layer in segments of one length, for each length up to `longest`."""
    yield evaluate(stages, [() for _ in stages])
    most = max((len(stage.layers) for stage in stages), default=0)
    for length in range(1, min(most, longest or most) + 1):
        yield evaluate(stages, [tuple(_cut(stage.layers, length)) for stage in stages])


def _cut(layers: Sequence[LayerCost], length: int) -> Iterator[tuple[int, int]]:
    """Segments of `length` layers, or fewer where a layer that cannot be recomputed follows."""
    begin = 0
    for index in range(len(layers) + 1):
        is_stop = index == len(layers) or not layers[index].can_recompute
        if is_stop or index - begin == length:
            if index > begin:
                yield begin, index
            begin = index + is_stop


def _kept_bytes(layers: Sequence[LayerCost], segments: Segments) -> list[int]:
    """Return the bytes that one microbatch keeps of each layer from its forward to its backward pass."""
    kept: list[int] = []
    first_of = {index: begin for begin, end in segments for index in range(begin, end)}
    for index, layer in enumerate(layers):
        if index in first_of:
            kept.append(layer.input if first_of[index] == index else 0)
        else:
            follows_kept = index > 0 and index - 1 not in first_of
            kept.append(layer.saved - (layer.shared if follows_kept else 0))
    return kept


_LEVELS = 256  # labels of one layer
_FEW_LEVELS = 32  # where only bytes matter
_LEVELS_PER_LIMIT = 8  # how much coarser the limits are that are tried
_Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]


def choose(
    stages: Sequence[StageCosts], budget: int, *, longest: int | None = None, levels: int = _LEVELS
) -> Choice | None:
    """The choice of least seconds that takes at most `budget` bytes; None if there is none. It is never
    slower than the best uniform split that fits. `longest`: how many layers a segment may have."""
    uniform = list(uniform_choices(stages, longest))
    fitting = [choice for choice in uniform if choice.peak <= budget]
    if uniform[0] in fitting:
        return uniform[0]
    fitting += _shortest_paths(_Problem.of(stages, budget, longest), levels)
    return min(fitting, key=lambda choice: (choice.seconds, choice.peak), default=None)


def least_bytes(stages: Sequence[StageCosts], longest: int | None = None) -> int:
    """About the smallest budget for which there is a choice; for this one there is one."""
    high = min(choice.peak for choice in uniform_choices(stages, longest))
    low = 0
    while high - low > max(1, high // 20):
        middle = (low + high) // 2
        choice = choose(stages, middle, longest=longest, levels=_FEW_LEVELS)
        low, high = (middle, high) if choice is None else (low, choice.peak)
    return high


class _Problem(NamedTuple):
    """All layers of a rank, stage after stage, as arrays; bytes are those of all microbatches in flight."""

    stages: Sequence[StageCosts]
    layers: list[LayerCost]
    in_flight: _Integers
    last: _Integers  # the end of each layer's stage
    seconds: _Floats  # of all layers before each
    recomputed: _Integers  # [begin, end]: bytes of a segment beside its input
    budget: int
    passed: float  # which part of kept bytes the microbatch has that is in its backward pass
    longest: int  # segment

    @classmethod
    def of(cls, stages: Sequence[StageCosts], budget: int, longest: int | None) -> "_Problem":
        layers = [layer for stage in stages for layer in stage.layers]
        in_flight = np.array([stage.in_flight for stage in stages for _ in stage.layers], dtype=np.int64)
        ends = np.cumsum([len(stage.layers) for stage in stages])
        last = np.repeat(ends, [len(stage.layers) for stage in stages])
        seconds = np.concatenate([[0.0], np.cumsum([layer.seconds for layer in layers])])
        saved = np.cumsum([0] + [layer.saved - layer.shared for layer in layers])
        first = np.array([layer.shared - layer.reused for layer in layers], dtype=np.int64)
        recomputed = np.asarray(saved[None, :] - saved[:-1, None] + first[:, None], dtype=np.int64)
        recomputed[np.repeat([stage.waiting > 0 for stage in stages], [len(s.layers) for s in stages])] = 0
        # With several stages, kept bytes behind a segment are counted as if they were still there.
        passed = 1 / stages[0].in_flight if len(stages) == 1 and stages[0].in_flight else 0.0
        budget -= sum(stage.fixed_bytes for stage in stages)
        most = longest or len(layers)
        return cls(stages, layers, in_flight, last, seconds, recomputed, budget, passed, most)

    def room(self, limit: int, kept: _Integers) -> _Floats:
        """Return how much a segment may take when it is computed again, with `kept` bytes up to its input."""
        return np.asarray(self.budget - limit + self.passed * (limit - kept), dtype=np.float64)


class _Labels:
    """The fastest labels of every layer, by bytes: [layer, whether the layer before is kept, level]."""

    def __init__(self, num_layers: int, limit: int, levels: int) -> None:
        shape = (num_layers + 1, 2, min(levels, limit + 1))
        self.limit = limit
        self.seconds = np.full(shape, np.inf)
        self.kept = np.zeros(shape, dtype=np.int64)
        self.origin = np.full(shape, -1, dtype=np.int64)  # the label that the last step came from
        self.seconds[0, 0, 0] = 0.0

    def of_kind(self, layer: int, is_kept: int | _Integers) -> tuple[_Floats, _Integers, _Integers]:
        """Seconds, kept bytes and numbers of the labels of a layer, where the one before is kept or not."""
        _, kinds, levels = self.seconds.shape
        columns = np.arange(levels)
        numbers = (layer * kinds + is_kept) * levels + columns
        return self.seconds[layer, is_kept, columns], self.kept[layer, is_kept, columns], numbers

    def at(self, layer: int) -> tuple[_Floats, _Integers, _Integers]:
        """Return the labels of both kinds: in each level, the faster."""
        return self.of_kind(layer, self.seconds[layer].argmin(axis=0))

    def by_level(
        self, seconds: _Floats, kept: _Integers, numbers: _Integers
    ) -> tuple[_Integers, _Floats, _Integers, _Integers]:
        """The levels of labels; in each level the fastest."""
        possible = np.flatnonzero((kept <= self.limit) & np.isfinite(seconds))
        order = possible[np.lexsort((kept[possible], seconds[possible]))]
        levels = kept[order] * self.seconds.shape[2] // (self.limit + 1)
        levels, first = np.unique(levels, return_index=True)
        chosen = order[first]
        return levels, seconds[chosen], kept[chosen], numbers[chosen]

    def improve(
        self,
        begin: int,
        is_kept: int,
        levels: _Integers,
        seconds: _Floats,
        kept: _Integers,
        numbers: _Integers,
    ) -> None:
        """Enter labels, of seconds [layer − begin, level], where they are faster than those there."""
        end = begin + len(seconds)
        rows, columns = np.nonzero(seconds < self.seconds[begin:end, is_kept, levels])
        place = (begin + rows, is_kept, levels[columns])
        self.seconds[place] = seconds[rows, columns]
        self.kept[place], self.origin[place] = kept[columns], numbers[columns]


def _shortest_paths(problem: _Problem, levels: int) -> Iterator[Choice]:
    """Choices that fit, the fastest among them, up to the levels."""
    if problem.budget < 0:
        return
    free = _label(problem, problem.budget, levels, bounded=False).at(len(problem.layers))
    fastest, number = np.inf, levels // _LEVELS_PER_LIMIT
    limits = [problem.budget * level // number for level in range(number, 0, -1)]
    # Of one microbatch, what is behind a segment does not matter.
    for limit in [problem.budget] if problem.passed == 1 else dict.fromkeys(limits):
        possible = free[0][free[1] <= limit]
        if not possible.size or possible.min() >= fastest:  # nor can a smaller limit be faster
            return
        for choice in _choices(problem, _label(problem, limit, levels)):
            if choice.peak <= problem.budget + sum(stage.fixed_bytes for stage in problem.stages):
                fastest = min(fastest, choice.seconds)
                yield choice
                break


def _label(problem: _Problem, limit: int, levels: int, *, bounded: bool = True) -> _Labels:
    """The labels of all layers, with at most `limit` bytes kept; `bounded`: segments fit the budget."""
    labels = _Labels(len(problem.layers), limit, levels)
    for index, layer in enumerate(problem.layers):
        _keep(problem, labels, index)
        if layer.can_recompute:
            _begin_segment(problem, labels, index, bounded=bounded)
    return labels


def _keep(problem: _Problem, labels: _Labels, index: int) -> None:
    """Steps that keep a layer."""
    layer, in_flight = problem.layers[index], int(problem.in_flight[index])
    is_first = index == 0 or problem.last[index - 1] == index
    for follows_kept in (0, 1):
        size = layer.saved - (layer.shared if follows_kept and not is_first else 0)
        seconds, kept, numbers = labels.of_kind(index, follows_kept)
        place, seconds, kept, numbers = labels.by_level(seconds, kept + in_flight * size, numbers)
        labels.improve(index + 1, 1, place, seconds[None], kept, numbers)


def _begin_segment(problem: _Problem, labels: _Labels, index: int, *, bounded: bool) -> None:
    """Steps that put a layer, and any number of those that follow in its stage, into a segment."""
    in_flight = int(problem.in_flight[index])
    seconds, kept, numbers = labels.at(index)
    kept = kept + in_flight * problem.layers[index].input
    place, seconds, kept, numbers = labels.by_level(seconds, kept, numbers)
    end, last = index, min(int(problem.last[index]), index + problem.longest)
    while end < last and problem.layers[end].can_recompute:
        end += 1
    room = problem.room(labels.limit, kept) if bounded else np.full(kept.shape, np.inf)
    sizes = problem.recomputed[index, index + 1 : end + 1]  # grow with the length
    sizes = sizes[: np.searchsorted(sizes, room.max(initial=0.0), side="right")]
    added = problem.seconds[index + 1 : index + 1 + len(sizes)] - problem.seconds[index]
    totals = np.where(sizes[:, None] <= room, seconds + added[:, None], np.inf)
    labels.improve(index + 1, 0, place, totals, kept, numbers)


def _choices(problem: _Problem, labels: _Labels) -> Iterator[Choice]:
    """Return the choices of the last layer's labels, the fastest first."""
    seconds, _, numbers = labels.at(len(problem.layers))
    for level in np.argsort(seconds, kind="stable"):
        if np.isfinite(seconds[level]):
            yield evaluate(problem.stages, _by_stage(problem, _path(labels, int(numbers[level]))))


def _path(labels: _Labels, number: int) -> list[tuple[int, int]]:
    segments = []
    while (origin := int(labels.origin.flat[number])) >= 0:
        end, is_kept, _ = np.unravel_index(number, labels.seconds.shape)
        if not is_kept:
            segments.append((int(np.unravel_index(origin, labels.seconds.shape)[0]), int(end)))
        number = origin
    return segments[::-1]


def _by_stage(problem: _Problem, segments: list[tuple[int, int]]) -> list[Segments]:
    result, begin = [], 0
    for stage in problem.stages:
        end = begin + len(stage.layers)
        result.append(tuple((a - begin, b - begin) for a, b in segments if begin <= a < end))
        begin = end
    return result
