"""How a model is cut into the stages of a plan, and what ties them together."""

from collections.abc import Sequence, Set
from typing import NamedTuple

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.collectives import Group
from echelon.data_parallel import Bond, Sync, Tied
from echelon.errors import UserError, raise_errors
from echelon.layering import listed_layers, outside_layers
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
from echelon.wrapping import replaced_forward


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

    def tied(self, sync: Sync) -> Sync:
        """The same, with bonds to the ranks that share a parameter of one of its stages.

        All ranks go through the bonds in the order of the ties, whichever stages they hold.
        """
        bonds = [
            self._bond(stage, tie, group)
            for tie, group in self.ties
            for stage in self.mine
            if stage in tie.stages
        ]
        return Tied(sync, bonds) if bonds else sync

    def _bond(self, stage: int, tie: Tie, group: Group) -> Bond:
        speaks = self.even or self.program.placement[stage][0] == self.rank
        return Bond(tie.parameter, group, speaks, counts=stage == tie.stages[0])


def cut(model: nn.Module, mesh: Mesh, boundaries: Sequence[int] | None, *, by_layers: bool) -> Stages:
    """Cut the model (before these layers, or evenly), take this rank's stages from the first rank, and drop
    the others. `by_layers`: even a single stage runs layer by layer, and not the model's own forward."""
    plan, group = mesh.plan, mesh.group("pipeline")
    program = _program(plan)
    if program.stages == 1:
        whole = _undivided(model, plan, by_layers=by_layers)
        return Stages({0: whole}, program, [], 0, even=True, boundaries=[])
    edges = even_boundaries(model, program.stages)
    if boundaries is not None:
        edges = check_boundaries(model, boundaries, program.stages)
    stages, ties = split(model, edges)
    _check_ties(ties, program, mesh)
    _check_shared(stages)
    _check_model(model)
    start_equal(stages, [holders[0] for holders in program.placement], group)
    mine: dict[int, nn.Module] = {number: stages[number] for number in program.stages_of(group.rank)}
    # Every rank makes every group, in the same order.
    groups = _groups(ties, program, mesh)
    keep_only(model, stages, [stages[number] for number in mine])
    return Stages(mine, program, groups, group.rank, mesh.layout.even, edges)


def _undivided(model: nn.Module, plan: Plan, *, by_layers: bool) -> nn.Module:
    """The model itself; or all of its layers in a row, where the plan is about them and they are made on the
    fly: only then are they called, so that their weights are gathered (zero=3)."""
    own = set(model.modules())
    listed = plan.zero == 0 or all(layer in own for layer in listed_layers(model))
    if listed and not by_layers:
        return model
    _check_model(model)
    return split(model, []).stages[0]


def _program(plan: Plan) -> Program:
    """What the plan's schedule does in a step."""
    if not plan.schedule_is_file:
        return build(plan.schedule, plan.replicas, plan.microbatches, plan.chunks, gather=plan.zero == 3)
    program = load_schedule(plan.schedule)
    errors = []
    replicas = _replicas(program)
    if replicas != plan.replicas:
        errors.append(
            f"its ranks hold the stages with replicas {'-'.join(map(str, replicas))}, and the plan has "
            f"pipeline={'-'.join(map(str, plan.replicas))}; set pipeline={'-'.join(map(str, replicas))}"
        )
    if program.microbatches != plan.microbatches:
        errors.append(
            f"it is for {program.microbatches} microbatches, and the plan has {plan.microbatches}; set "
            f"microbatches={program.microbatches}"
        )
    work = [its for rank in program.ranks for its in rank]
    if any(its.op is Op.STASH or its.version is not None for its in work):
        errors.append("it keeps weight versions, which only the schedules by name do; leave them out")
    if plan.zero == 3 and program.halves:
        errors.append("it cuts backwards in two, and zero=3 frees the weights between; use zero=2")
    if plan.compile and program.halves:
        errors.append("it cuts backwards in two, and those of compiled layers are one piece; drop compile")
    if any(not _ends_once(program, rank) for rank in range(len(program.ranks))):
        errors.append("a step has one REDUCE for each stage and then one UPDATE, at the end; leave them out")
    raise_errors(f"schedule={plan.schedule}", errors)
    return add_gathers(program) if plan.zero == 3 else program


def _groups(ties: list[Tie], program: Program, mesh: Mesh) -> list[tuple[Tie, Group]]:
    """Each tie of trained weights with the ranks that hold it: one group for each set of stages."""
    trained = [tie for tie in ties if tie.parameter.requires_grad]
    places = [frozenset(_position(program, mesh, stage) for stage in tie.stages) for tie in trained]
    made = {positions: mesh.group_of_stages(positions) for positions in dict.fromkeys(places)}
    return [(tie, made[positions]) for tie, positions in zip(trained, places, strict=True)]


def _replicas(program: Program) -> tuple[int, ...]:
    """The replicas of each position of the pipeline; a rank with several stages is one position."""
    if all(len(holders) == 1 for holders in program.placement):
        return (1,) * len(program.ranks)
    return tuple(len(holders) for holders in program.placement)


def _ends_once(program: Program, rank: int) -> bool:
    """Whether a rank sums each stage's gradients once, after its last backward, and then updates once."""
    ops = [its.op for its in program.ranks[rank]]
    stages = program.stages_of(rank)
    if ops.count(Op.REDUCE) != len(stages) or ops.count(Op.UPDATE) != 1 or ops[-1] is not Op.PUBLISH:
        return False
    backwards = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    for stage in stages:
        own = [its.op for its in program.ranks[rank] if its.stage == stage]
        if any(op in backwards for op in own[own.index(Op.REDUCE) :]):
            return False
    return True


def _position(program: Program, mesh: Mesh, stage: int) -> int:
    """Where a stage is along the pipeline axis: with replicas, each stage has a position of its own."""
    return program.placement[stage][0] if set(mesh.plan.replicas) == {1} else stage


def _check_ties(ties: list[Tie], program: Program, mesh: Mesh) -> None:
    """Refuse ties that cannot be kept."""
    trained = [tie for tie in ties if tie.parameter.requires_grad]
    names = ", ".join(tie.name for tie in trained)
    plan = mesh.plan
    if trained and plan.schedule in ASYNCHRONOUS:
        raise UserError(
            f"schedule={plan.schedule} with {names} in several stages: stages update at different times, so "
            "the copies would drift apart; untie the weights, or use schedule=1f1b"
        )
    if trained and plan.zero and not mesh.layout.even:
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


def _check_shared(stages: Sequence[Stage]) -> None:
    """Refuse modules in several stages that keep something of their own there."""
    seen: dict[nn.Module, int] = {}
    for number, stage in enumerate(stages):
        for module in set(stage.modules()):
            drops = isinstance(module, _DropoutNd) and module.p > 0
            keeps = any(True for _ in module.buffers(recurse=False))
            if (drops or keeps) and seen.setdefault(module, number) != number:
                raise UserError(
                    f"pipeline: one {type(module).__name__} is used in the stages {seen[module]} and "
                    f"{number}, and would {'repeat its masks' if drops else 'have other buffers'} there; "
                    "give each layer its own"
                )


def _check_model(model: nn.Module) -> None:
    """Refuse what belongs to the model as a whole, which no rank runs."""
    never = {name or type(model).__name__: module for name, module in outside_layers(model).items()}
    hooked = [name for name, module in never.items() if _has_hooks(module)]
    if hooked:
        raise UserError(
            f"forward hooks of {', '.join(hooked)}: where a plan runs layer by layer, only layers and what "
            "is in them are called, and these would never run; put the hooks on the layers"
        )
    replaced = [name for name, module in never.items() if replaced_forward(module) is not None]
    if replaced:
        raise UserError(
            f"{', '.join(replaced)} had forward replaced: where a plan runs layer by layer, only layers and "
            "what is in them are called, and this would never run; do it in a layer"
        )
    extra = [name for name in model.state_dict() if name.endswith("_extra_state")]
    if extra:
        raise UserError(
            f"pipeline: {', '.join(extra)} cannot be brought together from several stages; keep what it "
            "holds in buffers"
        )


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
