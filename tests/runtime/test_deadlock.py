"""No schedule deadlocks where operations run in the order of NCCL (see tests/nccl_like).

Programs, interpreter and wire are the real ones. A stage multiplies by a number: losses and gradients can be
written down, so a message that meets the wrong receive is found too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Edge, Edges, Group
from echelon.data_parallel import Buffers
from echelon.engine.step_program import step_program
from echelon.errors import UserError
from echelon.plan import ASYNCHRONOUS_SCHEDULES, Plan
from echelon.program import Program, add_transfers, asynchronous, forward_only
from echelon.runtime import Interpreter, Microbatch, Script, Stage, Versions, Wire
from tests.nccl_like import Deadlock, NcclMesh, NcclWorld

CPU = torch.device("cpu")
MakeEdges = Callable[[NcclMesh, Program], Edges]
Between = Callable[[int, Group], None]  # what a rank does after each run, with the group of all ranks


# A training of numbers.


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


class GradientSums:
    """A StageRuntime whose update adds up the gradients, and leaves the weights as they are."""

    counts_loss = True

    def __init__(self, modules: Mapping[int, Scale], replicas: Group, everyone: Group) -> None:
        self._modules, self._replicas, self._everyone = modules, replicas, everyone
        self.sums = dict.fromkeys(modules, 0.0)

    def loss(self, output: Any, microbatch: Microbatch) -> tuple[Tensor, Tensor | float]:
        return (output * microbatch.targets).sum(), 1.0

    def around(self, microbatch: Microbatch) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def reduce(self, stage: Stage) -> None:
        weight = self._modules[stage.index].weight
        if self._replicas.size > 1:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self._replicas.all_reduce(weight.grad)

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
        stages = {
            stage: Stage(stage, module, [], Buffers(module, replicas)) for stage, module in modules.items()
        }
        runtime = StageSums if program.versioned else GradientSums
        self._runtime = runtime(modules, replicas, self._everyone)
        self._versions = Versions(list(modules.values()), lambda: None) if program.versioned else None
        self._interpreter = Interpreter(stages, self._runtime, Wire(edges, CPU), CPU, self._versions)

    def train(self, runs: Sequence[Run], between: Between) -> tuple[float, dict[int, float]]:
        """The sum of losses that were computed here, and of the gradients of each stage."""
        losses = 0.0
        for run in runs:
            losses += self._run(run)
            between(self._rank, self._everyone)
        return losses, self._runtime.sums

    def _run(self, run: Run) -> float:
        purpose = "training" if run.trains else "evaluation"
        feed = {k: microbatch(k, purpose) for k in run.microbatches}
        with torch.set_grad_enabled(run.trains):
            tally = self._interpreter.run(Script(run.program, self._rank, empties=run.empties), feed)
        if not run.trains or not run.empties:  # else NORM has summed the losses, or there are none
            self._everyone.all_reduce(tally.clone())
        if self._versions is not None and run.empties:
            self._versions.restart()
        return float(tally[0])


def microbatch(k: int, purpose: str) -> Microbatch:
    inputs = torch.full((1,), input_of(k), dtype=torch.float64)
    return Microbatch(inputs, target_of(k), weight=1, look=purpose)


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
    text: str, make_edges: MakeEdges, length: int = 1, *, rests: bool = False, **options: Any
) -> None:
    """Train a plan, and compare with what is computed without stages.

    `rests`: between runs, ranks wait for their devices and meet.
    """
    plan = Plan.parse(text)
    runs = (continuous_runs if plan.schedule in ASYNCHRONOUS_SCHEDULES else flushed_runs)(plan, length)
    program = runs[0].program
    world = NcclWorld(plan.ranks, **options)

    def between(rank: int, everyone: Group) -> None:
        if rests:
            world.synchronize(rank)
            everyone.barrier()

    def train(rank: int) -> tuple[float, dict[int, float]]:
        mesh = NcclMesh(world, plan, rank)
        return RankTraining(mesh, program, make_edges(mesh, program)).train(runs, between)

    results = world.run(train)
    scale = prod(weight_of(stage) for stage in range(program.stages))
    trained = scale * sum(run.total for run in runs if run.trains)
    assert sum(losses for losses, _ in results) == pytest.approx(scale * sum(run.total for run in runs))
    for _, sums in results:
        for stage, gradient in sums.items():
            assert gradient == pytest.approx(trained / weight_of(stage))


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


# Schedules.


def plans() -> Iterator[str]:
    """Every schedule, with 2 to 8 stages and 1 to 9 microbatches; and with replicated stages."""
    for microbatches in range(1, 10):
        for stages in range(2, 9):
            pipeline = f"pipeline={stages} microbatches={microbatches}"
            for schedule in ("naive", "gpipe", "1f1b", "zero-bubble", "pipedream", "pipedream-vertical"):
                yield f"{pipeline} schedule={schedule}"
            if microbatches >= stages:
                yield f"{pipeline} schedule=pipedream-2bw"
            if microbatches % stages == 0:
                yield f"{pipeline} schedule=interleaved chunks=2"
                yield f"{pipeline} schedule=interleaved chunks=3"
        for replicas in ("3-1", "2-1-1"):
            for schedule in ("naive", "gpipe", "1f1b", "zero-bubble"):
                yield f"pipeline={replicas} microbatches={microbatches} schedule={schedule}"


@pytest.mark.parametrize("plan", list(plans()))
def test_no_schedule_deadlocks(plan: str) -> None:
    """Over communicators that are made at their first use, as torch makes them."""
    check_training(plan, edges_of_mesh, lazy=True)


SEVERAL = [
    "pipeline=4 microbatches=8 schedule=interleaved chunks=2",
    "pipeline=5 microbatches=6 schedule=1f1b",
    "pipeline=5 microbatches=6 schedule=naive",
    "pipeline=5 microbatches=6 schedule=zero-bubble",
    "pipeline=2-1-1 microbatches=5 schedule=gpipe",
    "pipeline=4 microbatches=3 schedule=pipedream",
    "pipeline=4 microbatches=1 schedule=pipedream-vertical",
    "pipeline=3 microbatches=4 schedule=pipedream-2bw",
]


@pytest.mark.parametrize("plan", SEVERAL)
def test_nor_does_a_longer_training(plan: str) -> None:
    """Two steps in a row, or two drains, around an evaluation."""
    check_training(plan, edges_of_mesh, length=2, lazy=True)


@pytest.mark.parametrize("plan", SEVERAL)
@pytest.mark.parametrize("options", [{}, {"waits_for_sends": False}, {"lazy": True, "seed": 0}], ids=str)
def test_nor_any_order_of_the_ranks(plan: str, options: dict[str, Any]) -> None:
    """Communicators are made at once; a rank does not wait until all is sent; any rank may run next."""
    check_training(plan, edges_of_mesh, **options)


@pytest.mark.parametrize("schedule", ["1f1b", *ASYNCHRONOUS_SCHEDULES])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_between_steps_every_device_comes_to_rest(schedule: str, stages: int) -> None:
    """PipeDream's sends waited for receives of the next step: torch.cuda.synchronize() and a barrier between
    two steps hung, and so did a rank that left."""
    for microbatches in (1, 4) if schedule != "pipedream-2bw" else (4,):
        plan = f"pipeline={stages} microbatches={microbatches} schedule={schedule}"
        check_training(plan, edges_of_mesh, length=2, rests=True)


@pytest.mark.parametrize("pipeline", ["3-1", "8-1", "15-1", "2-1-2"])
def test_stages_of_many_replicas_have_streams_enough(pipeline: str) -> None:
    """torch has 32 streams, which communicators take in turn."""
    check_training(f"pipeline={pipeline} microbatches=16", edges_of_mesh, streams=32)


# What this suite finds when earlier queues are put back.


@pytest.mark.parametrize(
    ("schedule", "passes", "deadlocks"),
    [  # (stages, microbatches)
        ("naive", (3, 1), (3, 2)),
        ("1f1b", (3, 9), (4, 5)),
        ("zero-bubble", (3, 9), (4, 5)),
        ("pipedream", (3, 9), (4, 3)),
        ("pipedream-vertical", (3, 9), (4, 3)),
        ("pipedream-2bw", (3, 9), (4, 4)),
        ("interleaved chunks=2", (2, 8), (3, 3)),
        ("interleaved chunks=3", (2, 8), (3, 3)),
    ],
)
def test_one_queue_per_direction_deadlocks(
    schedule: str, passes: tuple[int, int], deadlocks: tuple[int, int]
) -> None:
    """A receive that is posted ahead from rank r−1 holds up the send to rank r+1, or another receive."""
    for stages, microbatches in (passes, deadlocks):
        plan = f"pipeline={stages} microbatches={microbatches} schedule={schedule}"
        deadlock = pytest.raises(Deadlock, match=r"queue on pipeline.*: recv from .*, (send to|recv from)")
        with deadlock if (stages, microbatches) == deadlocks else nullcontext():
            check_training(plan, one_queue_per_direction)


@pytest.mark.parametrize(("pipeline", "streams"), [("2", 1), ("4", 2), ("3-1", 1), ("8-1", 1)])
def test_communicators_that_share_streams_deadlock(
    monkeypatch: pytest.MonkeyPatch, pipeline: str, streams: int
) -> None:
    """See [Note: shared streams] in mesh/stream_checks.py, which refuses such plans."""
    plan = f"pipeline={pipeline} microbatches=16"
    monkeypatch.setattr("echelon.mesh.stream_checks.NUM_STREAMS", streams)
    with pytest.raises(UserError, match=f"torch has {streams}"):
        check_training(plan, edges_of_mesh, length=2, streams=streams)
    monkeypatch.setattr("echelon.mesh.stream_checks.NUM_STREAMS", 100)
    with pytest.raises(Deadlock):
        check_training(plan, edges_of_mesh, length=2, streams=streams)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "pipedream"])
def test_communicators_that_are_made_at_their_first_message_deadlock(schedule: str) -> None:
    """A receive of a gradient makes a communicator, and waits for a rank that waits for the activation."""
    plan = f"pipeline=2 microbatches=2 schedule={schedule}"
    with pytest.raises(Deadlock, match=r"rank 0 waits for the making of pipeline"):
        check_training(plan, one_queue_per_direction, lazy=True)
