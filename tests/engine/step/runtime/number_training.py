"""A training of numbers over NcclWorld, which finds deadlocks and messages that meet the wrong receive.

Programs, interpreter and wire are the real ones. A stage multiplies by a number: losses and gradients can be
written down, so a message that meets the wrong receive is found too.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Edge, Edges, Group
from echelon.engine.step.runtime.flight import Microbatch, MicrobatchLoss
from echelon.engine.step.runtime.interpreter import Interpreter
from echelon.engine.step.runtime.script import Script
from echelon.engine.step.runtime.versions import Versions
from echelon.engine.step.runtime.wire import Wire
from echelon.parallel.data.buffers import Buffers
from echelon.parallel.observer import ForwardPass, Observers, StepObserver
from echelon.parallel.stage import Stage
from echelon.plan import Plan
from echelon.program import RECEIVES, SENDS, Instruction, Program, add_transfers, asynchronous, forward_only
from echelon.program.build import step_program
from tests.nccl_like import NcclMesh, NcclWorld

CPU = torch.device("cpu")
MakeEdges = Callable[[NcclMesh, Program], Edges]
Between = Callable[[int, Group], None]  # what a rank does after each run, with the group of all ranks


class Run(NamedTuple):
    """One call of the interpreter: a step, the drain of a pipeline, or an evaluation."""

    program: Program
    microbatches: Sequence[int]
    trains: bool = True
    empties: bool = True

    @property
    def total(self) -> float:
        """The loss with weights of 1."""
        return sum(input_of(k) * target_of(k) for k in self.microbatches)


def input_of(microbatch: int) -> float:
    return 1.0 + microbatch / 4


def target_of(microbatch: int) -> float:
    return 2.0 - microbatch / 8


def weight_of(stage: int) -> float:
    return 1.0 + (stage % 4) / 8


class Scale(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight_of(stage), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class SummedStage(Stage):
    """A stage of one weight, whose gradients are summed over its replicas."""

    def __init__(self, index: int, module: Scale, replicas: Group) -> None:
        super().__init__(index, module, [], Buffers(module, replicas))
        self._weight, self._replicas = module.weight, replicas

    def reduce(self) -> None:
        weight = self._weight
        if self._replicas.size > 1:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self._replicas.all_reduce(weight.grad)


class GradientSums(StepObserver):
    """An UpdateRuntime that adds up the gradients, and leaves the weights as they are; the losses, too."""

    are_counted = True
    deferring = staticmethod(nullcontext)

    def __init__(
        self, modules: Mapping[int, Scale], replicas: Group, everyone: Group, *, forwards_first: bool
    ) -> None:
        self._modules, self._replicas, self._everyone = modules, replicas, everyone
        self._forwards_first = forwards_first
        self.sums = dict.fromkeys(modules, 0.0)

    def of(self, output: Any, microbatch: Microbatch, _: ForwardPass) -> MicrobatchLoss:
        return MicrobatchLoss((output * microbatch.targets).sum(), (), 1.0, 1.0)

    def before_backwards(self, tally: Tensor) -> None:
        """As gates exchange what they have seen."""
        if self._forwards_first:
            self._everyone.all_reduce(tally.clone())

    def tie(self) -> None: ...

    def norm(self, tally: Tensor) -> None:
        self._everyone.all_reduce(tally.clone())

    def update(self) -> None:
        for stage, module in self._modules.items():
            assert module.weight.grad is not None
            self.sums[stage] += module.weight.grad.item()
            module.weight.grad = None

    def publish(self) -> None: ...


class StageSums(GradientSums):
    """Where stages update at different times, there is no norm over all of them."""

    def norm(self, tally: Tensor) -> None: ...


class RankTraining:
    """What one rank does."""

    def __init__(self, mesh: NcclMesh, program: Program, edges: Edges) -> None:
        self._rank, self._everyone = mesh.rank, mesh.group("all")
        replicas = mesh.group("weights")
        modules = {stage: Scale(stage) for stage in program.stages_of(mesh.rank)}
        stages = {stage: SummedStage(stage, module, replicas) for stage, module in modules.items()}
        runtime = StageSums if program.versioned else GradientSums
        first = program.forwards_first and not program.versioned  # where gates have losses
        self._runtime = runtime(modules, replicas, self._everyone, forwards_first=first)
        self._versions = Versions(list(modules.values()), lambda: None) if program.versioned else None
        observers = Observers()
        observers.add(self._runtime)
        self._interpreter = Interpreter(
            stages, self._runtime, observers, self._runtime, Wire(edges, CPU), CPU, self._versions
        )

    def wait_before_computing(self, wait: Callable[[], None]) -> None:
        """Call `wait` before every instruction that is no message."""
        do = self._interpreter._do

        def waiting(instruction: Instruction, inner: Callable[[Instruction], None]) -> None:
            wait()
            inner(instruction)

        for op in do.keys() - SENDS - RECEIVES:
            do[op] = partial(waiting, inner=do[op])

    def train(self, runs: Sequence[Run], between: Between) -> tuple[float, dict[int, float]]:
        """The sum of losses that were computed here, and of the gradients of each stage."""
        losses = 0.0
        scripts = {id(run): Script(run.program, self._rank, empties=run.empties) for run in runs}
        for run in runs:
            losses += self._run(run, scripts[id(run)])
            between(self._rank, self._everyone)
        return losses, self._runtime.sums

    def _run(self, run: Run, script: Script) -> float:
        purpose = "training" if run.trains else "evaluation"
        feed = {k: microbatch(k, purpose) for k in run.microbatches}
        with torch.set_grad_enabled(run.trains):
            tally = self._interpreter.run(script, feed)
        if not run.trains or not run.empties:  # else NORM has summed the losses, or there are none
            self._everyone.all_reduce(tally.clone())
        if self._versions is not None and run.empties:
            self._versions.restart()
        return float(tally[0])


def microbatch(k: int, purpose: str) -> Microbatch:
    inputs = torch.full((1,), input_of(k), dtype=torch.float64)
    return Microbatch(inputs, target_of(k), weight=1, form=purpose)


def flushed_runs(plan: Plan, steps: int) -> list[Run]:
    """An evaluation between so many steps; from the second step on, receives are posted ahead."""
    step = Run(step_program(plan, ties=False), range(plan.microbatches))
    return [*[step] * steps, evaluation(step.program.placement, plan), *[step] * steps]


def continuous_runs(plan: Plan, drains: int) -> list[Run]:
    """Steps until the pipeline is full and one more, and a drain; so many times, with evaluations between."""
    number = plan.microbatches

    def program(begin: int, taken: int) -> Program:
        schedule, drain = plan.schedule, taken == 0
        return add_transfers(
            asynchronous(schedule, plan.stages, number, begin=begin, taken=taken, drain=drain)
        )

    begins = range(0, plan.stages + number, number)
    steps = [Run(program(begin, number), range(begin, begin + number), empties=False) for begin in begins]
    drained = [*steps, Run(program(len(steps) * number, 0), ())]
    between = evaluation(steps[0].program.placement, plan)
    return [*drained, *[between, *drained] * (drains - 1)]


def evaluation(placement: Sequence[Sequence[int]], plan: Plan) -> Run:
    number = min(plan.microbatches, 4)  # more of them would only take longer
    return Run(add_transfers(forward_only(placement, number)), range(number), trains=False)


def check_training(
    text: str,
    make_edges: MakeEdges,
    length: int = 1,
    *,
    rests: bool = False,
    waits: bool = False,
    **options: Any,
) -> None:
    """Train a plan, and compare with what is computed without stages.

    `rests`: between runs, ranks wait for their devices and meet. `waits`: hosts wait for their devices
    wherever they compute.
    """
    plan = Plan.parse(text)
    runs = (flushed_runs if plan.flushes else continuous_runs)(plan, length)
    program = runs[0].program
    world = NcclWorld(plan.ranks, **options)

    def between(rank: int, everyone: Group) -> None:
        if rests:
            world.synchronize(rank)
            everyone.barrier()

    def train(rank: int) -> tuple[float, dict[int, float]]:
        mesh = NcclMesh(world, plan, rank)
        training = RankTraining(mesh, program, make_edges(mesh, program))
        if waits:
            training.wait_before_computing(partial(world.synchronize, rank))
        return training.train(runs, between)

    results = world.run(train)
    scale = prod(weight_of(stage) for stage in range(program.stages))
    loss, expected_loss = sum(losses for losses, _ in results), scale * sum(run.total for run in runs)
    assert loss == pytest.approx(expected_loss), f"the loss is {loss}, must be {expected_loss}"
    trained = scale * sum(run.total for run in runs if run.trains)
    for _, sums in results:
        for stage, gradient in sums.items():
            expected = trained / weight_of(stage)
            assert gradient == pytest.approx(expected), f"stage {stage}: {gradient}, must be {expected}"


# Queues.


def edges_of_mesh(mesh: NcclMesh, program: Program) -> Edges:
    return mesh.edges(program.pairs)


def one_queue_per_direction(mesh: NcclMesh, program: Program) -> Edges:
    """One communicator for all messages to higher ranks, and one for all to lower ones."""
    up, down = mesh.new_group(), mesh.new_group()
    others = [peer for peer in range(up.size) if peer != up.rank]
    return Edges(
        {peer: Edge(up if peer > up.rank else down, peer) for peer in others},
        {peer: Edge(up if peer < up.rank else down, peer) for peer in others},
    )
