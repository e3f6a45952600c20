"""`partition` finds the fastest split of a profile over a cluster: stages, each with replicas."""

import math
from collections.abc import Callable, Sequence

from echelon.errors import UserError, raise_errors
from echelon.planner.assess import assess
from echelon.planner.cluster import Level, cluster_errors, make_levels
from echelon.planner.cost import CostModel, Echelon
from echelon.planner.graph import Profile
from echelon.planner.result import Partition
from echelon.planner.solver import MemorySolver, Problem, TimeSolver
from echelon.planner.states import find_states

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
    return Partition(
        stages,
        pipeline_seconds=max(stage.seconds for stage in stages),
        data_parallel_seconds=_data_parallel(profile, levels, model),
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


def _data_parallel(profile: Profile, levels: tuple[Level, ...], model: CostModel) -> float:
    """Seconds with the whole model replicated on every worker, whether that fits or not."""
    seconds = profile.seconds
    for level in levels:
        seconds = float(model.stage(seconds, profile.parameter_bytes, level.workers, level))
    return seconds
