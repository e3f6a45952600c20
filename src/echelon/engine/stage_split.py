"""The stages of a plan: which layers this rank keeps, and which weights stages share."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.collectives import Group
from echelon.collectives.mesh import Mesh
from echelon.engine.saving.restore import mark_split
from echelon.errors import UserError
from echelon.nn.layering import listed_layers, outside_layers
from echelon.nn.wrapping import replaced_forward
from echelon.parallel.called_stage import CalledStage
from echelon.parallel.data.parameter_set import SharedGradient
from echelon.parallel.pipeline import (
    StageModule,
    Tie,
    check_boundaries,
    even_boundaries,
    keep_only,
    split_model,
)
from echelon.plan import Plan
from echelon.program import Program
from echelon.program.build import step_program


class StageSplit(NamedTuple):
    """The layers of each stage that this rank holds, and what it shares with other stages."""

    modules: dict[int, nn.Module]
    shared_gradients: dict[int, list[SharedGradient]]
    tied: frozenset[nn.Parameter]  # what other stages hold too, frozen or not
    program: Program  # of a step
    boundaries: list[int]  # the layers before which stages begin
    temporary_buffers: dict[str, Tensor]  # of other stages, in no state dict

    @property
    def by_layers(self) -> bool:
        """True if the layers run one after the other, and not the model's own forward."""
        return all(isinstance(module, StageModule) for module in self.modules.values())


def split_stages(
    model: nn.Module, mesh: Mesh, boundaries: Sequence[int] | None, *, by_layers: bool
) -> StageSplit:
    """Split the model (before these layers, or evenly) and drop the stages of other ranks. `by_layers`: even
    a single stage runs layer by layer, and not the model's own forward."""
    split = _split(model, mesh, boundaries, by_layers=by_layers)
    mark_split(model, mesh.plan, split.temporary_buffers)
    return split


def _split(model: nn.Module, mesh: Mesh, boundaries: Sequence[int] | None, *, by_layers: bool) -> StageSplit:
    plan = mesh.plan
    program = step_program(plan, ties=False)
    if program.stages == 1:
        whole = _undivided(model, plan, by_layers=by_layers)
        return StageSplit({0: whole}, {0: []}, frozenset(), program, [], {})
    edges = even_boundaries(model, program.stages)
    if boundaries is not None:
        edges = check_boundaries(model, boundaries, program.stages)
    stages, ties = split_model(model, edges)
    if not plan.flushes and not listed_layers(model):
        raise UserError(
            f"schedule={plan.schedule}: the forward of {type(model).__name__} calls its layers with code "
            "around them, which every stage runs, and stages of this schedule have other weights at the same "
            "time; give it layers() -> list[nn.Module], or use schedule=1f1b"
        )
    _check_ties(ties, program, mesh)
    _check_shared(stages)
    _check_model(model)
    rank = mesh.group("pipeline").rank
    local: dict[int, nn.Module] = {number: stages[number] for number in program.stages_of(rank)}
    shared = _shared_gradients(ties, list(local), program, mesh)
    tied = frozenset(tie.parameter for tie in ties if not local.keys().isdisjoint(tie.stages))
    if any(tie.parameter.requires_grad for tie in ties):
        program = step_program(plan, ties=True)
    temporary = keep_only(model, stages, [stages[number] for number in local])
    return StageSplit(local, shared, tied, program, edges, temporary)


def _undivided(model: nn.Module, plan: Plan, *, by_layers: bool) -> nn.Module:
    """The model itself; or all of its layers in a row, where the plan is about them and they are made on the
    fly: only then are they called, so that their weights are gathered (zero=3), they run again, or encode
    what they save."""
    own = set(model.modules())
    frees = plan.frees_weights or "activations" in plan.offload
    runs_again = plan.recompute not in ("none", "selective")
    by_units = plan.zero > 0 or runs_again or plan.compress != "none" or frees
    listed = not by_units or all(layer in own for layer in listed_layers(model))
    if listed and not by_layers:
        return model
    _check_model(model)
    return split_model(model, []).stages[0]


def _shared_gradients(
    ties: list[Tie], local: list[int], program: Program, mesh: Mesh
) -> dict[int, list[SharedGradient]]:
    """The ties of each local stage. Every rank asks for the group of every tie, in the same order."""
    rank = mesh.group("pipeline").rank
    shared: dict[int, list[SharedGradient]] = {stage: [] for stage in local}
    for number, (tie, group) in enumerate(_groups(ties, program, mesh)):
        for stage in (stage for stage in local if stage in tie.stages):
            contributes = mesh.layout.even or program.placement[stage][0] == rank
            counts_norm = stage == tie.stages[0]
            shared[stage].append(SharedGradient(tie.parameter, group, contributes, counts_norm, tie=number))
    return shared


def _groups(ties: list[Tie], program: Program, mesh: Mesh) -> list[tuple[Tie, Group]]:
    """Each tie of trained weights with the ranks that hold it: one group for each set of stages."""
    trained = [tie for tie in ties if tie.parameter.requires_grad]
    places = [frozenset(_position(program, mesh, stage) for stage in tie.stages) for tie in trained]
    made = {positions: mesh.group_of_stages(positions) for positions in dict.fromkeys(places)}
    return [(tie, made[positions]) for tie, positions in zip(trained, places, strict=True)]


def _position(program: Program, mesh: Mesh, stage: int) -> int:
    """Return the position of a stage along the pipeline axis: with replicas, each has its own."""
    return program.placement[stage][0] if set(mesh.plan.replicas) == {1} else stage


def _check_ties(ties: list[Tie], program: Program, mesh: Mesh) -> None:
    """Refuse ties that cannot be kept."""
    trained = [tie for tie in ties if tie.parameter.requires_grad]
    names = ", ".join(tie.name for tie in trained)
    plan = mesh.plan
    if trained and not plan.flushes:
        raise UserError(
            f"schedule={plan.schedule} with {names} in several stages: stages update at different times, so "
            "the copies would drift apart; untie the weights, or use schedule=1f1b"
        )
    if trained and plan.zero and not mesh.layout.even:
        raise UserError(
            f"zero={plan.zero} pipeline={'-'.join(map(str, plan.replicas))} with {names} in several stages: "
            "a part of a weight is summed over one rank of each stage, and stages of different replicas have "
            "no such groups of ranks; untie the weights, or use zero=0 without shard"
        )
    for tie in ties:
        holders = [program.placement[stage][0] for stage in tie.stages]
        if len(set(holders)) < len(holders):
            raise UserError(
                f"pipeline: {tie.name} is in the stages {', '.join(map(str, tie.stages))}, two of them on "
                "one rank; use other chunks, so that layers that share a weight are on different ranks"
            )


def _check_shared(stages: Sequence[StageModule | CalledStage]) -> None:
    """Refuse modules in several stages that keep something of their own there."""
    seen: dict[nn.Module, int] = {}
    for number, stage in enumerate(stages):
        for module in {module for layer in stage.layers() for module in layer.modules()}:
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
    outside = outside_layers(model) if listed_layers(model) else {}  # else the model's own forward runs
    never_called = {name or type(model).__name__: module for name, module in outside.items()}
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = [name for name, module in never_called.items() if any(getattr(module, kind) for kind in kinds)]
    if hooked:
        raise UserError(
            f"forward hooks of {', '.join(hooked)}: where a plan runs layer by layer, only layers and what "
            "is in them are called, and these would never run; put the hooks on the layers"
        )
    replaced = [name for name, module in never_called.items() if replaced_forward(module) is not None]
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
