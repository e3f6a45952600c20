"""The dynamic programme on one level: with m workers, a first stage and then the rest.

    best[m][i] = min over k, r of  max(stage(i → k on r), transfer at k, best[m − r][k])

Stages are prepended, back to front, since what a stage stashes depends on how many workers stand behind it.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from echelon.planner.cost import Place
from echelon.planner.states import Floats

_SAME = 1 + 1e-12  # costs this near are one cost: sums were rounded


class Costs(NamedTuple):
    """What a level charges; infinite is forbidden.

    `stage`: [i, k] for a stage from state i to state k and for what it passes on, unless none is behind it.
    `enter`: [i] for what comes to so many replicas at state i.
    """

    stage: Callable[[Place], Floats]
    enter: Callable[[int], Floats]


class Team(NamedTuple):
    """The workers of one unit: how many, how many may share a stage, and the ranks behind the unit."""

    workers: int
    most_replicas: int
    outside: float

    def places(self, workers: int) -> Iterator[Place]:
        """Where a first stage may stand when `workers` are left."""
        for replicas in range(1, min(workers, self.most_replicas) + 1):
            yield Place(replicas, workers - replicas, self.outside)


def least_bottleneck(costs: Costs, team: Team, columns: list[int]) -> Floats:
    """[i, c]: the least bottleneck from state i to state `columns[c]` with the whole team.

    What enters at i and what leaves at the last state is charged by the level above.
    """
    rest: list[Floats] = []  # rest[m]: with m workers, and what enters at i charged
    for workers in range(team.workers + 1):
        best = entered = np.full((len(costs.enter(1)), len(columns)), np.inf)
        for place in team.places(workers):
            cost = costs.stage(place)
            cost = _min_max(cost, rest[place.behind]) if place.behind else cost[:, columns]
            best = np.minimum(best, cost)
            entered = np.minimum(entered, np.maximum(cost, costs.enter(place.replicas)[:, None]))
        rest.append(entered)
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
    costs: Costs, team: Team, begin: int, end: int, limit: float, traffic: Floats
) -> list[tuple[int, int, Place]]:
    """The stages (from, to, place) of a split whose costs are all within `limit`.

    The one with the fewest stages; then the least `traffic` over the states where it cuts; then the first.
    """
    limit *= _SAME
    tie = traffic / (1.0 + team.workers * traffic.max(initial=0.0))  # a whole split's is less than a stage
    tie[begin] = 0.0
    rest = [np.full(len(traffic), np.inf)]  # rest[m][i]: the score from i with m workers
    rest[0][end] = 0.0

    def scores(place: Place) -> Floats:
        """[i, k]: the score when the first stage goes from i to k."""
        entering = costs.enter(place.replicas) <= limit
        entering[begin] = True
        allowed = (costs.stage(place) <= limit) & entering[:, None]
        behind = np.where(allowed, rest[place.behind][None, :], np.inf)
        return np.asarray(behind + (1.0 + tie)[:, None])

    for workers in range(1, team.workers + 1):
        rest.append(np.min([scores(place).min(axis=1) for place in team.places(workers)], axis=0))
    stages: list[tuple[int, int, Place]] = []
    state, workers = begin, team.workers
    while workers:
        options = [(scores(place)[state], place) for place in team.places(workers)]
        row, place = min(options, key=lambda option: float(option[0].min()))
        stages.append((state, int(row.argmin()), place))
        state, workers = stages[-1][1], place.behind
    assert state == end
    return stages
