"""How a model is cut into the stages of a plan, and what ties them together."""

from collections.abc import Set
from typing import NamedTuple

from torch import nn

from echelon.collectives import Group
from echelon.data_parallel import Bond, Sync, Tied
from echelon.errors import UserError
from echelon.mesh import Mesh
from echelon.pipeline_parallel import Tie, even_boundaries, keep_only, split, start_equal
from echelon.program import ASYNCHRONOUS, Program, build


class Stages(NamedTuple):
    """The stages that this rank holds, where all of them are, and the parameters that several share."""

    mine: dict[int, nn.Module]
    program: Program
    ties: list[tuple[Tie, Group]]
    rank: int  # in the pipeline
    even: bool  # whether every stage has as many replicas

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


def cut(model: nn.Module, mesh: Mesh) -> Stages:
    """Cut the model, take this rank's stages from the first rank, and drop the others."""
    plan, group = mesh.plan, mesh.group("pipeline")
    program = build(plan.schedule, plan.replicas, plan.microbatches, plan.chunks, gather=plan.zero == 3)
    if program.stages == 1:
        return Stages({0: model}, program, [], 0, even=True)
    stages, ties = split(model, even_boundaries(model, program.stages))
    _check_ties(ties, program, mesh)
    start_equal(stages, [holders[0] for holders in program.placement], group)
    mine: dict[int, nn.Module] = {number: stages[number] for number in program.stages_of(group.rank)}
    # Every rank makes every group, in the same order.
    groups = [(tie, mesh.among({_position(program, mesh, stage) for stage in tie.stages})) for tie in ties]
    keep_only(model, [stages[number] for number in mine])
    return Stages(mine, program, groups, group.rank, mesh.layout.even)


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
