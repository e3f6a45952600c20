"""The dynamic program over the levels of a cluster.

On every level but the outermost, each pair of states is solved for one unit (a machine). The answer is the
compute time on the level above. With a memory limit, the answer of a machine depends on how many ranks work
behind it, so each such number is solved separately.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from echelon.planner.cost import Bytes, CostModel, Level, StagePosition
from echelon.planner.dynamic import (
    MOST_NUMBERS,
    Costs,
    CostTable,
    Progress,
    Team,
    fewest_stages,
    least_bottleneck,
)
from echelon.planner.graph import Floats, States

MANY_WORKERS = 100  # from here on, a `CostTable` is faster


class Piece(NamedTuple):
    """The layers from one state to another, their position on a level, and how each worker splits them."""

    begin: int
    end: int
    position: StagePosition
    inner: tuple["Piece", ...]


class Problem(NamedTuple):
    """The states of one profile, one cluster, one cost model, and the limits on the split."""

    states: States
    levels: tuple[Level, ...]
    model: CostModel
    memory: float | None = None
    straight: bool = False


class _Solver(ABC):
    """Recursion over the levels. A subclass says what a stage costs."""

    def __init__(self, problem: Problem) -> None:
        states = problem.states
        self.problem = problem
        self.parameters = states.between(states.parameters)
        self.bytes = Bytes(
            self.parameters,
            states.between(states.outputs),
            states.between(states.stash),
            np.broadcast_to(states.crossing[:, None], states.nested.shape),
        )
        self._solved: dict[tuple[int, float], Floats] = {}

    @abstractmethod
    def costs(self, depth: int) -> Costs:
        """The costs of level `depth`."""

    def best(self, progress: Progress = lambda _: None) -> float:
        """The least bottleneck over all levels; infinite if no split is allowed."""
        depth = len(self.problem.levels) - 1
        last = len(self.problem.states.masks) - 1
        return float(least_bottleneck(self.costs(depth), self.team(depth, 0.0), [last], progress)[0, 0])

    def team(self, depth: int, outside: float) -> Team:
        workers = self.problem.levels[depth].workers
        return Team(workers, 1 if self.problem.straight else workers, outside)

    def inside(self, depth: int, position: StagePosition) -> float:
        """The ranks behind one worker of level `depth`, where memory depends on them; else 0."""
        matters = self.problem.memory is not None and self.problem.model.sees_outside
        return position.ranks_behind(self.problem.levels[depth]) if matters else 0.0

    def below(self, depth: int, position: StagePosition) -> Floats:
        """[i, k]: the cost of one worker of level `depth` > 0, which is a team of the level below."""
        outside = self.inside(depth, position)
        key = (depth - 1, outside)
        if key not in self._solved:
            columns = list(range(len(self.problem.states.masks)))
            team = self.team(depth - 1, outside)
            self._solved[key] = least_bottleneck(self.costs(depth - 1), team, columns)
        return self._solved[key]


class TimeSolver(_Solver):
    """Minimises the time per microbatch, within the memory limit."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._stages: dict[tuple[int, int, bool, float], Floats] = {}
        # The costs of the outermost level, for many workers without a limit of memory, if they fit.
        self._table: CostTable | None = None
        depth = len(problem.levels) - 1
        team = self.team(depth, 0.0)
        numbers = len(problem.states.masks) ** 2 // 2 * team.workers
        if problem.memory is None and team.most_replicas >= MANY_WORKERS and numbers <= MOST_NUMBERS:
            seconds = Costs(lambda position: self._seconds(depth, position), self.costs(depth).enter)
            self._table = CostTable(seconds, team)  # not by `_stage`, whose cache would be as large again

    def best(self, progress: Progress = lambda _: None) -> float:
        return super().best(progress) if self._table is None else self._table.least_bottleneck(progress)

    def costs(self, depth: int) -> Costs:
        return Costs(
            lambda position: self._stage(depth, position), lambda replicas: self._transfer(depth, replicas)
        )

    def _transfer(self, depth: int, replicas: int) -> Floats:
        problem = self.problem
        seconds = problem.model.transfer(problem.states.crossing, replicas, problem.levels[depth])
        return np.asarray(seconds)

    def _stage(self, depth: int, position: StagePosition) -> Floats:
        levels, model, memory = self.problem.levels, self.problem.model, self.problem.memory
        key = (depth, position.replicas, position.behind > 0, self.inside(depth, position) if depth else 0.0)
        if key not in self._stages:
            self._stages[key] = self._seconds(depth, position)
        if memory is None:
            return self._stages[key]
        return np.where(
            model.memory(self.bytes, position, levels[depth]) <= memory, self._stages[key], np.inf
        )

    def _seconds(self, depth: int, position: StagePosition) -> Floats:
        """Seconds of stages and of what they send on, whether they fit into memory or not."""
        states, levels, model, *_ = self.problem
        if depth:
            compute = self.below(depth, position)
        else:
            compute = np.where(states.nested, states.between(states.seconds), np.inf)
        seconds = np.asarray(model.stage(compute, self.parameters, position.replicas, levels[depth]))
        if position.behind and model.sender_pays:
            seconds = np.maximum(seconds, self._transfer(depth, position.replicas)[None, :])
        return seconds

    def split(self, limit: float, progress: Progress = lambda _: None) -> tuple[Piece, ...]:
        """A split that takes no longer than `limit`, with the fewest stages."""
        depth, last = len(self.problem.levels) - 1, len(self.problem.states.masks) - 1
        crossing = self.problem.states.crossing
        if self._table is not None:
            stages = self._table.fewest(limit, crossing)
        else:
            stages = fewest_stages(
                self.costs(depth), self.team(depth, 0.0), 0, last, limit, crossing, progress
            )
        return tuple(Piece(*stage, self._inner(depth, *stage)) for stage in stages)

    def _inner(self, depth: int, begin: int, end: int, position: StagePosition) -> tuple[Piece, ...]:
        if depth == 0:
            return ()
        limit = float(self.below(depth, position)[begin, end])
        costs, team = self.costs(depth - 1), self.team(depth - 1, self.inside(depth, position))
        stages = fewest_stages(costs, team, begin, end, limit, self.problem.states.crossing)
        return tuple(Piece(*stage, self._inner(depth - 1, *stage)) for stage in stages)


class MemorySolver(_Solver):
    """Minimises the memory per rank, whatever the time: the number to report when nothing fits."""

    def costs(self, depth: int) -> Costs:
        free = np.zeros_like(self.problem.states.crossing)
        return Costs(lambda position: self._stage(depth, position), lambda _: free)

    def _stage(self, depth: int, position: StagePosition) -> Floats:
        states, levels, model, *_ = self.problem
        below = self.below(depth, position) if depth else np.where(states.nested, 0.0, np.inf)
        return np.asarray(np.maximum(below, model.memory(self.bytes, position, levels[depth])))
