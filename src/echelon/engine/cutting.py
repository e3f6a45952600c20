"""How a model is cut into the stages of a plan, and what ties them together."""

from collections.abc import Sequence, Set
from typing import NamedTuple

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.collectives import Group
from echelon.data_parallel import Bond, Sync, Tied
from echelon.errors import UserError, raise_faults
from echelon.mesh import Mesh
from echelon.pipeline_parallel import (
    Stage,
    Tie,
    check_boundaries,
    even_boundaries,
    keep_only,
    split,
    start_equal,
)
from echelon.plan import Plan
from echelon.program import ASYNCHRONOUS, Op, Program, add_gathers, build, load_schedule


class Stages(NamedTuple):
    """The stages that this rank holds, where all of them are, and the parameters that several share."""

    mine: dict[int, nn.Module]
    program: Program
    ties: list[tuple[Tie, Group]]
    rank: int  # in the pipeline
    even: bool  # whether every stage has as many replicas
    boundaries: list[int]  # the layers before which stages begin

    @property
    def alone(self) -> Set[nn.Parameter]:
        return {tie.parameter for tie, _ in self.ties}

    def tied(self, stage: int, sync: Sync) -> Sync:
        """The same, with bonds to the other stages that share one of its parameters."""
        bonds = [self._bond(stage, tie, group) for tie, group in self.ties if stage in tie.stages]
        return Tied(sync, bonds) if bonds else sync

    def _bond(self, stage: int, tie: Tie, group: Group) -> Bond:
        speaks = self.even or self.program.placement[stage][0] == self.rank
        return Bond(tie.parameter, group, speaks, counts=stage == tie.stages[0])


def cut(model: nn.Module, mesh: Mesh, boundaries: Sequence[int] | None) -> Stages:
    """Cut the model (before these layers, or evenly), take this rank's stages from the first rank, and drop
    the others."""
    plan, group = mesh.plan, mesh.group("pipeline")
    program = _program(plan)
    if program.stages == 1:
        return Stages({0: model}, program, [], 0, even=True, boundaries=[])
    edges = even_boundaries(model, program.stages)
    if boundaries is not None:
        edges = check_boundaries(model, boundaries, program.stages)
    stages, ties = split(model, edges)
    _check_ties(ties, program, mesh)
    _check_dropout(stages)
    start_equal(stages, [holders[0] for holders in program.placement], group)
    mine: dict[int, nn.Module] = {number: stages[number] for number in program.stages_of(group.rank)}
    # Every rank makes every group, in the same order.
    groups = [(tie, mesh.among({_position(program, mesh, stage) for stage in tie.stages})) for tie in ties]
    keep_only(model, [stages[number] for number in mine])
    return Stages(mine, program, groups, group.rank, mesh.layout.even, edges)


def _program(plan: Plan) -> Program:
    """What the plan's schedule does in a step."""
    if not plan.schedule_is_file:
        return build(plan.schedule, plan.replicas, plan.microbatches, plan.chunks, gather=plan.zero == 3)
    program = load_schedule(plan.schedule)
    faults = []
    if len(program.ranks) != sum(plan.replicas):
        faults.append(
            f"it is for {len(program.ranks)} ranks, and pipeline={'-'.join(map(str, plan.replicas))} has "
            f"{sum(plan.replicas)}; set pipeline={len(program.ranks)}"
        )
    if program.microbatches != plan.microbatches:
        faults.append(
            f"it is for {program.microbatches} microbatches, and the plan has {plan.microbatches}; set "
            f"microbatches={program.microbatches}"
        )
    if any(its.op is Op.STASH or its.version is not None for rank in program.ranks for its in rank):
        faults.append("it keeps weight versions, which only the schedules by name do; leave them out")
    raise_faults(f"schedule={plan.schedule}", faults)
    return add_gathers(program) if plan.zero == 3 else program


def _position(program: Program, mesh: Mesh, stage: int) -> int:
    """Where a stage is along the pipeline axis: with replicas, each stage has a position of its own."""
    return program.placement[stage][0] if set(mesh.plan.replicas) == {1} else stage


def _check_ties(ties: list[Tie], program: Program, mesh: Mesh) -> None:
    """Refuse ties that cannot be kept."""
    names = ", ".join(tie.name for tie in ties)
    plan = mesh.plan
    if ties and plan.schedule in ASYNCHRONOUS:
        raise UserError(
            f"schedule={plan.schedule} with {names} in several stages: stages update at different times, so "
            "the copies would drift apart; untie the weights, or use schedule=1f1b"
        )
    if ties and plan.zero and not mesh.layout.even:
        raise UserError(
            f"zero={plan.zero} pipeline={'-'.join(map(str, plan.replicas))} with {names} in several stages: "
            "stages of different replicas cut a weight into different parts, so theirs cannot be summed; "
            "untie the weights, or use zero=0"
        )
    for tie in ties:
        holders = [program.placement[stage][0] for stage in tie.stages]
        if len(set(holders)) < len(holders):
            raise UserError(
                f"pipeline: {tie.name} is in the stages {', '.join(map(str, tie.stages))}, two of them on "
                "one rank; use other chunks, so that layers that share a weight are on different ranks"
            )


def _check_dropout(stages: Sequence[Stage]) -> None:
    """A dropout module counts its uses, which it cannot do over several ranks."""
    seen: dict[nn.Module, int] = {}
    for number, stage in enumerate(stages):
        for module in set(stage.modules()):
            if isinstance(module, _DropoutNd) and module.p > 0 and seen.setdefault(module, number) != number:
                raise UserError(
                    f"pipeline: one dropout module is used in the stages {seen[module]} and {number}, and "
                    "would repeat its masks there; give each layer its own"
                )
