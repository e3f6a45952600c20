"""Puts together what records the passes of an engine's steps."""

from functools import partial

from echelon.engine.setup import Setup
from echelon.engine.step.graphs.cuda_recorder import CudaRecorder, Recorder
from echelon.engine.step.graphs.graphed_passes import GraphedPasses, Surroundings
from echelon.engine.step.graphs.obstacles import plan_obstacle
from echelon.engine.step.step import FlushedRunner


def make_graphs(
    setup: Setup, runner: FlushedRunner, recorder: Recorder | None = None
) -> GraphedPasses | None:
    """Return what runs the passes of `runner`, unless its plan has none that can be recorded."""
    plan = setup.mesh.plan
    if plan_obstacle(plan) is not None:
        return None
    surroundings = Surroundings(
        plan=plan,
        device=setup.mesh.device,
        local=setup.local,
        feed=runner.feed,
        observers=setup.observers,
        aside=runner.aside,
        start_spans=partial(runner.timer.start_step, 0, ()),
        draws=lambda: _obstacle_of(setup, runner),
        loss=lambda: setup.layers.loss,
        numbers_of=lambda tally: setup.update.numbers_of(*tally) if setup.update.is_of_one_rank else None,
        warns=setup.mesh.rank == 0,
    )
    return GraphedPasses(runner.run_as_is, surroundings, recorder or CudaRecorder())


def _obstacle_of(setup: Setup, runner: FlushedRunner) -> str | None:
    if runner.changes_weights:
        return "the forward changes weights"
    if setup.mesh.plan.compile and setup.scopes.drops:
        return "dropout in compiled layers reads the number of its step on the host"
    return setup.scopes.drawn()
