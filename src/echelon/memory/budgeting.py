"""recompute=budget:BYTES: what a plan and its program say about the budget of a rank."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from echelon.collectives import Group
from echelon.collectives.mesh import Mesh
from echelon.memory.recompute import BudgetedStage, BudgetSettings, RankBudget, SegmentSettings
from echelon.nn.wrapping import Wrapping
from echelon.parallel.stage import LocalStages
from echelon.plan import Plan
from echelon.program import Op, Program


def is_budget(plan: Plan) -> bool:
    return plan.recompute.startswith("budget:")


def make_budgeted(
    names: Mapping[nn.Module, str], settings: SegmentSettings, mesh: Mesh, program: Program, stage: int
) -> BudgetedStage:
    """The layers of one stage of this rank."""
    rank = mesh.group("pipeline").rank
    in_flight = _in_flight(program, rank, stage)
    if not mesh.plan.flushes:  # a step of these begins with a full pipeline
        in_flight = (program.stages - stage, 0)
    return BudgetedStage(list(names), list(names.values()), settings, _settings(mesh), in_flight)


def share_budget(
    stages: Mapping[int, BudgetedStage], local: LocalStages, mesh: Mesh, wrapping: Wrapping
) -> RankBudget:
    """Let the stages of this rank share its budget."""
    for budgeted in stages.values():
        budgeted.wrap(wrapping)
    pairs = {number: (budgeted, local.stages[number].module) for number, budgeted in stages.items()}
    return RankBudget(_settings(mesh), pairs, str(mesh.plan))


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
    """The largest of each number over the ranks of groups. Reads the device: for new shapes, once per layer
    and once at the end of the step; with expert > 1 also once per forward pass, beside the reads of every
    layer with experts."""
    if all(group.size == 1 for group in groups):
        return list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    for group in groups:
        with group.ledger.about("budget"):
            group.all_reduce(tensor, "max")
    return [float(number) for number in tensor.tolist()]


def _in_flight(program: Program, rank: int, stage: int) -> tuple[int, int]:
    """The most microbatches before their backward pass, and of them those between its halves: all others
    are counted as if these were as many at any time."""
    forward = waiting = most = most_waiting = 0
    for instruction in program.ranks[rank]:
        if instruction.stage != stage:
            continue
        forward += {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}.get(instruction.op, 0)
        waiting += {Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: -1}.get(instruction.op, 0)
        most, most_waiting = max(most, forward), max(most_waiting, waiting)
    return most - most_waiting, most_waiting
