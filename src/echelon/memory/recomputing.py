"""recompute=full, sqrt, budget:BYTES: layers of a stage in segments, which run again in the backward pass."""

from torch import nn

from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.memory.budgeting import is_budget, make_budgeted, share_budget
from echelon.memory.recompute import (
    BudgetedStage,
    Checkpoints,
    ContiguousCheckpoints,
    SecondRunCheck,
    Segment,
    SegmentSettings,
    SplitCheckpoints,
    WholeCheckpoints,
    backward_follows,
    divide,
)
from echelon.memory.recompute.selective import SelectiveRecompute
from echelon.nn.layering import how_to_list, listed_layers
from echelon.nn.sequence import View
from echelon.nn.wrapping import Wrapping
from echelon.parallel.observer import Observers
from echelon.parallel.stage import LocalStages
from echelon.plan import Plan


def recompute_layers(
    local: LocalStages, mesh: Mesh, view: View, wrapping: Wrapping, observers: Observers
) -> None:
    """If the plan says so, let the layers of this rank's stages drop what autograd saves."""
    plan = mesh.plan
    if plan.recompute == "selective":
        observers.add(SelectiveRecompute(plan))
    if plan.recompute in ("none", "selective"):
        return
    check = SecondRunCheck()
    observers.add(check)
    budgeted: dict[int, BudgetedStage] = {}
    for number, stage in local.stages.items():
        layers = _layers(stage.module, plan)
        first = [0, *local.boundaries][number]
        names = {
            layer: f"layer {first + index} ({type(layer).__name__})" for index, layer in enumerate(layers)
        }
        checkpoints = _make_checkpoints(mesh, observers)
        settings = SegmentSettings(mesh.device, view, check, checkpoints, stage.second_run)
        if is_budget(plan):
            budgeted[number] = make_budgeted(names, settings, mesh, local.program, number)
            continue
        segments = divide(list(names), plan.recompute)
        if backward_follows(local.program, number):
            segments = segments[:-1]
        for segment in segments:
            Segment(segment, [names[layer] for layer in segment], settings).wrap(wrapping)
    if budgeted:
        observers.add(share_budget(budgeted, local, mesh, wrapping))


def _make_checkpoints(mesh: Mesh, observers: Observers) -> Checkpoints:
    """How a stage keeps the inputs of segments."""
    checkpoints: Checkpoints = WholeCheckpoints()
    if mesh.plan.contiguous:
        checkpoints = contiguous = ContiguousCheckpoints(mesh.device, checkpoints)
        observers.add(contiguous)
    if mesh.plan.checkpoints == "split":
        checkpoints = SplitCheckpoints(mesh.group("tensor"), checkpoints)
    return checkpoints


def _layers(module: nn.Module, plan: Plan) -> list[nn.Module]:
    layers = listed_layers(module)
    if not layers:
        raise UserError(
            f"plan '{plan}': {type(module).__name__} lists no layers, which would run again; "
            f"{how_to_list(module)}"
        )
    return layers
