"""The dynamic program of `dynamic` for thousands of workers, where a stage costs the same whatever is behind.

Counts of workers are bits here. With a limit on the cost, the replicas that a stage from i to k may have are
a few runs of numbers. `reach[i]` has bit m where m workers get from i to the end, all within the limit:

    reach[i] = OR over k and runs lo … hi of  reach[k] << lo | … | reach[k] << hi

The least limit that all workers can keep is found by bisection. Then `fewest` picks the split that `dynamic`
would pick: fewest stages, least traffic, first.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.planner.cost import StagePosition
from echelon.planner.dynamic import SAME, Costs, Progress, Team
from echelon.planner.states import Floats

_NEAR = 1.01
MOST_NUMBERS = 10**8  # of a table


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
            self._costs[:, replicas - 1] = self._column(costs, replicas)

    def _column(self, costs: Costs, replicas: int) -> Floats:
        behind, outside = costs.stage, self._team.outside
        stage = behind(StagePosition(replicas, 1, outside))[self._begins, self._ends]
        final = behind(StagePosition(replicas, 0, outside))[self._begins, self._ends]
        enter = np.where(self._begins > 0, costs.enter(replicas)[self._begins], 0.0)
        return np.maximum(np.where(self._ends == self._states - 1, final, stage), enter)

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
        return self._walk(limit, scores, tie)

    def _walk(self, limit: float, scores: Floats, tie: Floats) -> list[tuple[int, int, StagePosition]]:
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
