"""`partition` finds the fastest split of a profile over a cluster: stages, each with replicas."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from echelon.errors import UserError, raise_errors
from echelon.planner.cost import Bytes, CostModel, Echelon, Level, StagePosition, cluster_errors, make_levels
from echelon.planner.graph import Node, Profile, find_states, stage_of_layers
from echelon.planner.solver import MemorySolver, Piece, Problem, TimeSolver


@dataclass(frozen=True)
class Stage:
    """Consecutive layers on some workers. All times are per microbatch of the whole pipeline.

    `seconds` is the time of the stage, or of a transfer to or from it where that is longer. `memory_bytes` is
    the memory of one of its workers in the cost model.
    """

    layers: tuple[str, ...]
    replicas: int
    seconds: float
    compute_seconds: float
    gradient_seconds: float
    activation_seconds: float
    memory_bytes: float
    workers: tuple[int, ...]

    @property
    def limit(self) -> str:
        """The bottleneck of the stage: the part that takes the longest."""
        times = {
            "compute": self.compute_seconds,
            "gradients": self.gradient_seconds,
            "activations": self.activation_seconds,
        }
        return max(times, key=lambda name: times[name])

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "layers": list(self.layers),
            "workers": list(self.workers),
            "limit": self.limit,
        }


@dataclass(frozen=True)
class Partition:
    """A split of a profile. `exact`: no other split is faster under the cost model."""

    stages: tuple[Stage, ...]
    pipeline_seconds: float
    data_parallel_seconds: float
    single_device_seconds: float
    cost_model: str
    exact: bool

    @property
    def speedup_over_data_parallel(self) -> float:
        return self.data_parallel_seconds / self.pipeline_seconds

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """The number of layers of each stage: with a chain of layers, where to cut."""
        return tuple(len(stage.layers) for stage in self.stages)

    @property
    def plan(self) -> str:
        """The fields of a plan: 'data=4' for one stage, 'pipeline=4', or 'pipeline=3-1'."""
        if len(self.stages) == 1:
            return f"data={self.replicas[0]}"
        if set(self.replicas) == {1}:
            return f"pipeline={len(self.stages)}"
        return "pipeline=" + "-".join(map(str, self.replicas))

    def to_dict(self) -> dict[str, Any]:
        return {
            "pipeline_seconds": self.pipeline_seconds,
            "data_parallel_seconds": self.data_parallel_seconds,
            "single_device_seconds": self.single_device_seconds,
            "speedup_over_data_parallel": self.speedup_over_data_parallel,
            "plan": self.plan,
            "cost_model": self.cost_model,
            "exact": self.exact,
            "stages": [stage.to_dict() for stage in self.stages],
        }


# The largest problems that take about two seconds. Every level but the outermost solves all pairs of states.
MOST_STATES, MOST_STATES_OF_PAIRS = 1024, 256


def partition(
    profile: Profile,
    workers: int | Sequence[int],
    bandwidth: float | Sequence[float],
    *,
    cost_model: CostModel | None = None,
    memory: float | None = None,
    straight: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> Partition:
    """Split a profile over all workers so that a microbatch takes the least time once the pipeline is full.

    `workers` and `bandwidth` (bytes per second) are innermost first: 4 GPUs in each of 2 machines are (4, 2).
    `memory` bounds the bytes on each worker; `straight` forbids replicas; `progress` is told which part of
    the work is done, from 0 to 1.

        partition(profile(model, batch), workers=4, bandwidth=1e9).plan  ->  'pipeline=3-1'
    """
    counts = (workers,) if isinstance(workers, int) else tuple(workers)
    rates = (bandwidth,) if isinstance(bandwidth, int | float) else tuple(bandwidth)
    model = cost_model or Echelon()
    raise_errors("the cluster", argument_errors(counts, rates, model, memory))
    levels = make_levels(counts, rates)
    states = find_states(profile, MOST_STATES if len(levels) == 1 else MOST_STATES_OF_PAIRS)
    problem = Problem(states, levels, model, memory, straight)
    solver = TimeSolver(problem)
    best = solver.best(lambda done: progress(done / 2))
    if math.isinf(best):
        _refuse(problem)
    stages = assess(problem, profile, solver.split(best, lambda done: progress((1 + done) / 2)))
    replicated = profile.seconds  # with the whole model on every worker, whether that fits or not
    for level in levels:
        replicated = float(model.stage(replicated, profile.parameter_bytes, level.workers, level))
    return Partition(
        stages,
        pipeline_seconds=max(stage.seconds for stage in stages),
        data_parallel_seconds=replicated,
        single_device_seconds=profile.seconds,
        cost_model=model.name,
        exact=states.exact,
    )


def argument_errors(
    workers: tuple[int, ...], bandwidths: tuple[float, ...], model: CostModel, memory: float | None
) -> list[str]:
    """Every error of the cluster, and of how the microbatches fit it."""
    errors = cluster_errors(workers, bandwidths, memory)
    ranks = math.prod(workers) if not errors else 1
    microbatches = model.microbatches if isinstance(model, Echelon) else None
    if microbatches is not None and microbatches < ranks:
        errors.append(
            f"microbatches {microbatches}, workers {ranks}: every replica needs a microbatch; give at least "
            f"{ranks} microbatches, or fewer workers"
        )
    return errors


def _refuse(problem: Problem) -> None:
    """Raise why there is no split: too few layers for a straight pipeline, or too little memory."""
    ranks, layers = problem.levels[0].ranks, problem.states.masks[-1].bit_count()
    if problem.straight and layers < ranks:
        count = "is only 1 layer" if layers == 1 else f"are only {layers} layers"
        raise UserError(
            f"a straight pipeline of {ranks} workers needs {ranks} layers, but there {count}; "
            "allow replicas, or use fewer workers"
        )
    assert problem.memory is not None
    needed = math.ceil(MemorySolver(problem).best())
    raise UserError(
        f"no split fits into {problem.memory:.0f} bytes per worker: the leanest split over {ranks} workers "
        f"needs {needed} bytes; give at least that much memory, use more workers, or profile a smaller "
        "microbatch"
    )


def assess(problem: Problem, profile: Profile, pieces: tuple[Piece, ...]) -> tuple[Stage, ...]:
    """The stages of a split in the order of the pipeline, over all levels."""
    drafts = _Assessor(problem, profile).unit(len(problem.levels) - 1, pieces, (0,), 0.0)
    places = stage_of_layers(profile, [problem.states.masks[end] for end, _ in drafts])
    names = [
        tuple(node.name for node, place in zip(profile.nodes, places, strict=True) if place == index)
        for index in range(len(drafts))
    ]
    return tuple(replace(stage, layers=layers) for layers, (_, stage) in zip(names, drafts, strict=True))


_Draft = tuple[int, Stage]  # the state behind a stage, and the stage, whose layers are named in the end


class _Assessor:
    def __init__(self, problem: Problem, profile: Profile) -> None:
        self._problem, self._profile = problem, profile

    def unit(
        self, depth: int, pieces: tuple[Piece, ...], firsts: tuple[int, ...], outside: float
    ) -> list[_Draft]:
        """The stages of one unit of level `depth`, with its times. `firsts`: first ranks of its copies."""
        level = self._problem.levels[depth]
        drafts: list[_Draft] = []
        taken = 0
        for index, piece in enumerate(pieces):
            position = piece.position._replace(outside=outside)
            ranks = tuple(
                first + (taken + worker) * level.inside
                for first in firsts
                for worker in range(position.replicas)
            )
            taken += position.replicas
            if depth:
                inner = self.unit(depth - 1, piece.inner, ranks, position.ranks_behind(level))
            else:
                compute = self._sum(piece, lambda node: node.seconds)
                stage = Stage((), len(ranks), compute, compute, 0.0, 0.0, 0.0, ranks)
                inner = [(piece.end, stage)]
            stages = [self._replicated(stage, piece, position, level) for _, stage in inner]
            if index > 0:
                stages[0] = self._with_transfer(stages[0], piece.begin, position, level)
            if index < len(pieces) - 1 and self._problem.model.sender_pays:
                stages[-1] = self._with_transfer(stages[-1], piece.end, position, level)
            drafts += zip((end for end, _ in inner), stages, strict=True)
        return drafts

    def _replicated(self, stage: Stage, piece: Piece, position: StagePosition, level: Level) -> Stage:
        """`stage` on several workers of a level, which exchange their gradients."""
        model, replicas = self._problem.model, position.replicas
        size = Bytes(
            self._sum(piece, lambda node: node.parameter_bytes),
            self._sum(piece, lambda node: node.output_bytes),
            self._sum(piece, lambda node: node.stash_bytes),
            float(self._problem.states.crossing[piece.begin]),
        )
        exchange = model.exchange(size.parameters, replicas, level)
        return replace(
            stage,
            seconds=float(model.join(stage.seconds / replicas, exchange)),
            compute_seconds=stage.compute_seconds / replicas,
            gradient_seconds=float(model.join(stage.gradient_seconds / replicas, exchange)),
            activation_seconds=stage.activation_seconds / replicas,
            memory_bytes=max(stage.memory_bytes, float(model.memory(size, position, level))),
        )

    def _with_transfer(self, stage: Stage, state: int, position: StagePosition, level: Level) -> Stage:
        """`stage` with the activations that cross the split at `state`."""
        size = float(self._problem.states.crossing[state])
        seconds = float(self._problem.model.transfer(size, position.replicas, level))
        longest = max(stage.activation_seconds, seconds)
        return replace(stage, seconds=max(stage.seconds, seconds), activation_seconds=longest)

    def _sum(self, piece: Piece, amount: Callable[[Node], float]) -> float:
        masks = self._problem.states.masks
        within = masks[piece.end] & ~masks[piece.begin]
        return math.fsum(
            amount(node) for position, node in enumerate(self._profile.nodes) if within >> position & 1
        )
