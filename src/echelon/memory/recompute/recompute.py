"""recompute=full, sqrt, budget:BYTES: which layers of a stage form segments, to run again in the backward.

The layers of a model that lists none are the units that zero=3 would gather: its own forward calls them.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import isqrt
from typing import TypeVar

import torch
from torch import nn

from echelon.collectives import Group
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.memory.recompute.budget_stage import BudgetedStage, BudgetSettings, RankBudget
from echelon.memory.recompute.saved_inputs import ContiguousInputs, SavedInputs, SplitInputs
from echelon.memory.recompute.second_run import SecondRunCheck
from echelon.memory.recompute.segment import Segment, SegmentSettings
from echelon.memory.recompute.selective import SelectiveRecompute
from echelon.nn.layering import called_layers, how_to_list, listed_layers
from echelon.nn.sequence import View
from echelon.nn.wrapping import Wrapping
from echelon.parallel.observer import Observers
from echelon.parallel.stage import LocalStages, Stage
from echelon.plan import Plan
from echelon.program import COMPUTE, Op, Program

T = TypeVar("T")


def recompute_layers(
    local: LocalStages, mesh: Mesh, view: View, wrapping: Wrapping, observers: Observers
) -> None:
    """Let the layers of this rank's stages drop what autograd saves, if the plan says so."""
    plan = mesh.plan
    if plan.recompute == "selective":
        observers.add(SelectiveRecompute(plan))
    if plan.recompute in ("none", "selective"):
        return
    check = SecondRunCheck()
    observers.add(check)
    budgeted: dict[int, BudgetedStage] = {}
    for number, stage in local.stages.items():
        names = _named_layers(stage, plan, [0, *local.boundaries][number])
        inputs = SavedInputs()
        if plan.contiguous:
            inputs = contiguous = ContiguousInputs(mesh.device, inputs)
            observers.add(contiguous)
        if plan.checkpoints == "split":
            inputs = SplitInputs(mesh.group("tensor"), inputs)
        settings = SegmentSettings(mesh.device, view, check, inputs, stage.second_run)
        if plan.recompute.startswith("budget:"):
            in_flight = _in_flight(local.program, mesh.group("pipeline").rank, number)
            if not plan.flushes:  # a step of these begins with a full pipeline
                in_flight = (local.program.stages - number, 0)
            layers = list(names), list(names.values())
            budgeted[number] = BudgetedStage(*layers, settings, _settings(mesh), in_flight)
            continue
        segments = divide(list(names), plan.recompute)
        if backward_follows(local.program, number):
            segments = segments[:-1]
        for segment in segments:
            Segment(segment, [names[layer] for layer in segment], settings).wrap(wrapping)
    if budgeted:
        for each in budgeted.values():
            each.wrap(wrapping)
        pairs = {number: (each, local.stages[number].module) for number, each in budgeted.items()}
        observers.add(RankBudget(_settings(mesh), pairs, str(plan)))


def _named_layers(stage: Stage, plan: Plan, first: int) -> dict[nn.Module, str]:
    """Return the layers of a stage that run again, in their order, each with its name in errors."""
    module, layers = stage.module, stage.layers()
    if listed_layers(module):
        return {layer: f"layer {n} ({type(layer).__name__})" for n, layer in enumerate(layers, first)}
    if plan.recompute.startswith("budget:"):  # is for layers whose order is known
        called = called_layers(module)
        if called is None:
            raise UserError(
                f"plan '{plan}': {type(module).__name__} lists no layers, and a budget is for layers in a "
                f"known order; use recompute=full, or {how_to_list(module)}"
            )
        layers = called.layers
    names = {each: name for name, each in module.named_modules()}
    return {layer: f"{names[layer]} ({type(layer).__name__})" for layer in layers}


def divide(layers: Sequence[T], recompute: str) -> list[list[T]]:
    """Divide a stage's layers into segments.

    divide([0, 1, 2, 3], "full")        # [[0], [1], [2], [3]]
    divide([0, 1, 2, 3], "sqrt")        # [[0, 1], [2, 3]]
    """
    assert recompute in ("full", "sqrt"), recompute
    if recompute == "full":
        return [[layer] for layer in layers]
    number = isqrt(len(layers) - 1) + 1  # rounded up
    base, more = divmod(len(layers), number)
    edges = [index * base + min(index, more) for index in range(number + 1)]
    return [list(layers[begin:end]) for begin, end in pairwise(edges)]


def backward_follows(program: Program, stage: int) -> bool:
    """Return whether the backward pass of each microbatch through `stage` follows its forward pass at once:
    what its last layers save is needed then, and nothing is gained if it is dropped."""
    if stage != program.stages - 1:
        return False
    for rank in program.placement[stage]:
        ops = [each for each in program.ranks[rank] if each.stage == stage and each.op in COMPUTE]
        for one, following in pairwise(ops):
            is_forward = one.op is Op.FORWARD
            if is_forward and (following.op is Op.FORWARD or following.microbatch != one.microbatch):
                return False
    return True


def _settings(mesh: Mesh) -> BudgetSettings:
    experts = [mesh.group("expert")] if mesh.plan.expert > 1 else []
    return BudgetSettings(
        int(mesh.plan.recompute.removeprefix("budget:")),
        partial(_agree, [mesh.group("tensor"), mesh.group("context"), *experts], mesh.device),
        partial(_agree, experts, mesh.device) if experts else None,
        # With longer segments, which weights are gathered next would depend on the choice of each replica.
        longest=1 if mesh.plan.frees_weights else None,
    )


def _agree(groups: Sequence[Group], device: torch.device, numbers: Sequence[float]) -> list[float]:
    """Return the largest of each number over the ranks of groups. Reads the device: for new shapes, once per
    layer and once at the end of the step; with expert > 1 also once per forward pass."""
    if all(group.size == 1 for group in groups):
        return list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    for group in groups:
        with group.ledger.about("budget"):
            group.all_reduce(tensor, "max")
    return [float(number) for number in tensor.tolist()]


def _in_flight(program: Program, rank: int, stage: int) -> tuple[int, int]:
    """Return the most microbatches before their backward pass, and the most between its halves: both are
    counted as if they were reached at the same time."""
    forward = waiting = most = most_waiting = 0
    for instruction in program.ranks[rank]:
        if instruction.stage != stage:
            continue
        forward += {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}.get(instruction.op, 0)
        waiting += {Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: -1}.get(instruction.op, 0)
        most, most_waiting = max(most, forward), max(most_waiting, waiting)
    return most - most_waiting, most_waiting
