"""The dynamic program on one level: with m workers, a first stage and then the rest.

    best[m][i] = min over k, r of  max(stage(i → k on r), transfer at k, best[m − r][k])

Stages are prepended, back to front, because the stash of a stage depends on how many workers are behind it.

`CostTable` is the same for thousands of workers, where a stage costs the same whatever is behind. There,
counts of workers are bits. With a limit on the cost, the replicas that a stage from i to k may have are a few
runs of numbers. `reach[i]` has bit m where m workers get from i to the end, all within the limit:

    reach[i] = OR over k and runs lo … hi of  reach[k] << lo | … | reach[k] << hi

The least limit that all workers can keep is found by bisection. Then `fewest` picks the split that the first
program would pick: fewest stages, least traffic, first.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.planner.cost import StagePosition
from echelon.planner.graph import Floats

SAME = 1 + 1e-12  # costs this close are equal: sums were rounded
_NEAR = 1.01
MOST_NUMBERS = 10**8  # of a table

Progress = Callable[[float], None]


class Costs(NamedTuple):
    """The costs of one level; infinite means not allowed.

    `stage`: [i, k] of a stage from state i to state k, with what it sends on if a stage is behind it.
    `enter`: [i] of what so many replicas receive at state i.
    """

    stage: Callable[[StagePosition], Floats]
    enter: Callable[[int], Floats]


class Team(NamedTuple):
    """The workers of one unit: how many, how many may share a stage, and the ranks behind the unit."""

    workers: int
    most_replicas: int
    outside: float

    def positions(self, workers: int) -> Iterator[StagePosition]:
        """The possible positions of a first stage when `workers` are left."""
        for replicas in range(1, min(workers, self.most_replicas) + 1):
            yield StagePosition(replicas, workers - replicas, self.outside)


def least_bottleneck(
    costs: Costs, team: Team, columns: list[int], progress: Progress = lambda _: None
) -> Floats:
    """[i, c]: the least bottleneck from state i to state `columns[c]` with the whole team.

    The level above adds the cost of what enters at i and of what leaves at the last state. `progress` is
    told which part of the work is done.
    """
    rest: list[Floats] = []  # rest[m]: with m workers, and what enters at i charged
    for workers in range(team.workers + 1):
        best = entered = np.full((len(costs.enter(1)), len(columns)), np.inf)
        for position in team.positions(workers):
            cost = costs.stage(position)
            cost = _min_max(cost, rest[position.behind]) if position.behind else cost[:, columns]
            best = np.minimum(best, cost)
            entered = np.minimum(entered, np.maximum(cost, costs.enter(position.replicas)[:, None]))
        rest.append(entered)
        progress((workers / team.workers) ** 2)
    return best


def _min_max(first: Floats, rest: Floats) -> Floats:
    """[i, c]: the least over k of max(first[i, k], rest[k, c]), a matrix product of (min, max)."""
    if rest.shape[1] == 1:
        return np.asarray(np.maximum(first, rest[:, 0]).min(axis=1)[:, None])
    product = np.full((first.shape[0], rest.shape[1]), np.inf)
    for middle in range(1, first.shape[1]):  # states are sorted by size: only smaller ones lead here
        larger = np.maximum(first[:middle, middle, None], rest[middle, None, :])
        np.minimum(product[:middle], larger, out=product[:middle])
    return product


def fewest_stages(
    costs: Costs,
    team: Team,
    begin: int,
    end: int,
    limit: float,
    traffic: Floats,
    progress: Progress = lambda _: None,
) -> list[tuple[int, int, StagePosition]]:
    """The stages (from, to, position) of a split whose costs are all within `limit`.

    The fewest stages win; then the least `traffic` over the states where it cuts; then the first.
    """
    limit *= SAME
    tie = traffic / (1.0 + team.workers * traffic.max(initial=0.0))  # a whole split's is less than a stage
    tie[begin] = 0.0
    rest = [np.full(len(traffic), np.inf)]  # rest[m][i]: the score from i with m workers
    rest[0][end] = 0.0

    def scores(position: StagePosition) -> Floats:
        """[i, k]: the score when the first stage goes from i to k."""
        entering = costs.enter(position.replicas) <= limit
        entering[begin] = True
        allowed = (costs.stage(position) <= limit) & entering[:, None]
        behind = np.where(allowed, rest[position.behind][None, :], np.inf)
        return np.asarray(behind + (1.0 + tie)[:, None])

    for workers in range(1, team.workers + 1):
        rest.append(np.min([scores(position).min(axis=1) for position in team.positions(workers)], axis=0))
        progress((workers / team.workers) ** 2)
    stages: list[tuple[int, int, StagePosition]] = []
    state, workers = begin, team.workers
    while workers:
        options = [(scores(position)[state], position) for position in team.positions(workers)]
        row, position = min(options, key=lambda option: float(option[0].min()))
        stages.append((state, int(row.argmin()), position))
        state, workers = stages[-1][1], position.behind
    assert state == end
    return stages


class Run(NamedTuple):
    """A stage from state `begin` to state `end` may have `least` to `most` replicas."""

    begin: int
    end: int
    least: int
    most: int


class CostTable:
    """The cost of each stage from state to state, with what enters it, for each number of replicas."""

    def __init__(self, costs: Costs, team: Team) -> None:
        self._team, self._states = team, len(costs.enter(1))
        last = self._states - 1
        finite = np.isfinite(costs.stage(StagePosition(1, 1, team.outside)))
        finite[:, last] = np.isfinite(costs.stage(StagePosition(1, 0, team.outside))[:, last])
        self._begins, self._ends = np.nonzero(finite)
        self._costs = np.empty((len(self._begins), team.most_replicas))
        for replicas in range(1, team.most_replicas + 1):
            between, final = (
                costs.stage(StagePosition(replicas, behind, team.outside))[self._begins, self._ends]
                for behind in (1, 0)
            )
            enter = np.where(self._begins > 0, costs.enter(replicas)[self._begins], 0.0)
            self._costs[:, replicas - 1] = np.maximum(np.where(self._ends == last, final, between), enter)

    def least_bottleneck(self, progress: Progress = lambda _: None) -> float:
        """The least limit that all workers can keep: one of the costs; infinite if there is none."""
        finite = np.isfinite(self._costs)
        low, high = float(self._costs.min()), float(self._costs.max(where=finite, initial=0.0))
        if not self._is_reached(high):
            return math.inf
        while high > _NEAR * low > 0.0:  # few costs are left between
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self._is_reached(middle) else (middle, high)
        left = np.unique(self._costs[(self._costs >= low) & (self._costs <= high)])
        first, last = 0, len(left) - 1
        while first < last:
            progress(1 - math.log2(last - first + 1) / math.log2(len(left) + 1))
            middle_index = (first + last) // 2
            if self._is_reached(float(left[middle_index])):
                last = middle_index
            else:
                first = middle_index + 1
        return float(left[last]) if len(left) else high

    def _is_reached(self, limit: float) -> bool:
        counts = (2 << self._team.workers) - 1  # more workers than there are do not count
        reach = [0] * self._states
        reach[-1] = 1
        for begin, end, least, most in self._runs(limit):
            if reach[end]:
                reach[begin] |= _smear(reach[end], most - least + 1) << least & counts
        return bool(reach[0] >> self._team.workers & 1)

    def _runs(self, limit: float) -> Iterator[Run]:
        """The runs of allowed replicas, of late states first."""
        allowed = np.zeros((len(self._begins), self._costs.shape[1] + 2), dtype=np.bool_)
        allowed[:, 1:-1] = self._costs <= limit
        pairs, firsts = np.nonzero(allowed[:, 1:] & ~allowed[:, :-1])
        _, lasts = np.nonzero(allowed[:, :-1] & ~allowed[:, 1:])
        begins, ends = self._begins[pairs].tolist(), self._ends[pairs].tolist()
        runs = zip(begins, ends, (firsts + 1).tolist(), lasts.tolist(), strict=True)
        return map(Run._make, reversed(list(runs)))

    def fewest(self, limit: float, traffic: Floats) -> list[tuple[int, int, StagePosition]]:
        """As `dynamic.fewest_stages`, over all states."""
        limit *= SAME
        workers = self._team.workers
        tie = traffic / (1.0 + workers * traffic.max(initial=0.0))
        tie[0] = 0.0
        scores = np.full((self._states, workers + 1), np.inf)  # [i, m]: from i with m workers
        scores[-1, 0] = 0.0
        for run in self._runs(limit):
            behind = _window_min(scores[run.end], run.least, run.most)
            np.minimum(scores[run.begin], behind + (1.0 + tie[run.begin]), out=scores[run.begin])
        stages: list[tuple[int, int, StagePosition]] = []
        state, left = 0, self._team.workers
        while left:
            own = np.nonzero(self._begins == state)[0]
            most = min(left, self._costs.shape[1])
            behind = scores[self._ends[own]][:, left - most : left][:, ::-1]  # [k, r - 1] with left - r
            options = np.where(self._costs[own, :most] <= limit, behind, np.inf) + (1.0 + tie[state])
            replicas = int(options.min(axis=0).argmin()) + 1
            end = int(self._ends[own[int(options[:, replicas - 1].argmin())]])
            position = StagePosition(replicas, left - replicas, self._team.outside)
            stages.append((state, end, position))
            state, left = end, left - replicas
        assert state == self._states - 1
        return stages


def _smear(bits: int, count: int) -> int:
    """bits | bits << 1 | … | bits << count - 1"""
    width = 1
    while 2 * width <= count:
        bits |= bits << width
        width *= 2
    return bits | bits << (count - width)


def _window_min(values: NDArray[np.float64], least: int, most: int) -> Floats:
    """[m]: the least of values[m - most] … values[m - least]; infinite outside."""
    count, width = most - least + 1, 1
    while 2 * width <= count:
        values = np.minimum(values, _shifted(values, width))
        width *= 2
    return _shifted(np.minimum(values, _shifted(values, count - width)), least)


def _shifted(values: Floats, by: int) -> Floats:
    moved = np.full_like(values, np.inf)
    moved[by:] = values[: len(values) - by]
    return moved
