"""The dynamic program on one level: with m workers, a first stage and then the rest.

    best[m][i] = min over k, r of  max(stage(i → k on r), transfer at k, best[m − r][k])

Stages are prepended, back to front, because the stash of a stage depends on how many workers are behind it.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from echelon.planner.cost import StagePosition
from echelon.planner.states import Floats

SAME = 1 + 1e-12  # costs this close are equal: sums were rounded


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
