"""What `auto` stands for: a whole plan, or its stages alone.

`pipeline=auto`: the first rank measures the model's layers, and the planner splits them over all ranks. What
comes out is a plan without `auto`, and the boundaries of its stages. Ranks measure differently, so one
measures and broadcasts its answer. The bandwidth is that of a broadcast among all ranks, measured too.
"""

import copy
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives import Ledger, group_over
from echelon.collectives.agreement import agree_on_every_rank, decide_on_rank_0
from echelon.collectives.mesh import this_device
from echelon.engine.model_checks import accept_model
from echelon.engine.stage_split import split_stages
from echelon.engine.step.batch_reader import BatchReader, read_sample
from echelon.engine.step.feed import to_device
from echelon.errors import UserError
from echelon.launching import host_work, join
from echelon.nn.batch import DTYPES, Batch, Inputs, Objective, cast, num_samples, take_part
from echelon.nn.dropout.modules import key_dropout
from echelon.nn.losses import Loss
from echelon.nn.wrapping import Wrapping
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.own_loss import choose_loss
from echelon.parallel.tensor.styles import Table
from echelon.plan import AUTO, Plan
from echelon.planner import partition, profile
from echelon.planner.cluster.here import PROBE, cluster_of_reports, report_of_rank, seconds_of
from echelon.planner.searching.choice import choose
from echelon.planner.searching.request import Request, is_request
from echelon.planner.shape.shape import ModelShape

Resolved = tuple[Plan, Sequence[int] | None]  # without `auto`, and before which layers its stages begin


def resolve(
    model: nn.Module, plan: Plan, sample_batch: Batch | None, boundaries: Sequence[int] | None
) -> Resolved:
    """Measure and split, on all ranks together; a plan that says its stages stays as it is."""
    if plan.pipeline != AUTO:
        return plan, boundaries
    if sample_batch is None:
        raise UserError(
            "pipeline=auto: measuring the layers takes a batch; give parallelize one, like "
            "sample_batch=(inputs, targets), or say the stages, like pipeline=2"
        )
    device = this_device()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    workers = _workers(plan, ranks)
    if workers == 1:
        return replace(plan, pipeline=1), None
    assert dist.group.WORLD is not None
    group = group_over("all", dist.group.WORLD, Ledger())
    message = torch.zeros(PROBE, dtype=torch.uint8, device=device)
    bandwidth = PROBE / seconds_of(partial(group.broadcast, message), group)
    group.close()
    chosen = decide_on_rank_0(lambda: _choose(model, plan, sample_batch, workers, bandwidth, device))
    return _resolved(plan, chosen["replicas"], chosen["layers"])


def ranks_here(plan: Plan) -> int:
    """Count the ranks to start on this machine: those of the plan; with `auto`, one per device."""
    if plan.pipeline != AUTO:
        return plan.ranks
    devices = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    others = plan.data * plan.tensor * plan.context
    return max(1, devices // others) * others


def _workers(plan: Plan, ranks: int) -> int:
    others = plan.data * plan.tensor * plan.context
    if ranks % others:
        raise UserError(
            f"plan '{plan}' with {ranks} ranks: the pipeline takes what data × tensor × context = {others} "
            f"leaves, so the ranks must be a multiple of that; start {others * max(1, ranks // others)} ranks"
        )
    return ranks // others


def _choose(
    model: nn.Module, plan: Plan, sample_batch: Batch, workers: int, bandwidth: float, device: torch.device
) -> dict[str, Any]:
    inputs, targets = take_part(take_part(sample_batch, 0, plan.data), 0, plan.microbatches)
    inputs = cast(to_device(inputs, device), DTYPES[plan.precision])
    with host_work("the times of layers"):
        measured = profile(model, (inputs, targets))
    # Weight versions and gathered weights are each rank's own, and ranks with different experts compute
    # together: those stages have no replicas.
    straight = not plan.flushes or plan.zero == 3 or plan.expert > 1
    split = partition(measured, workers, bandwidth, straight=straight)
    return {"replicas": split.replicas, "layers": split.layer_counts}


def _resolved(plan: Plan, replicas: list[int], layers: list[int]) -> Resolved:
    if len(replicas) == 1:
        return replace(plan, pipeline=1, data=plan.data * replicas[0]), None
    boundaries = [sum(layers[:number]) for number in range(1, len(layers))]
    return replace(plan, pipeline=tuple(replicas)), boundaries


# Plan "auto": the planner chooses for the model, the batch, the ranks and the devices that are there. Each
# rank says what its device is, or measures it; rank 0 predicts every plan and asks, of a copy of the model
# without memory, whether it can be divided so. All ranks get its answer, and rank 0 prints it.


class Task(NamedTuple):
    """What a plan is chosen for, beside the ranks: the arguments of `parallelize` that it depends on."""

    model: nn.Module
    loss: Loss | None
    objective: Objective | None
    layers: str | Sequence[str] | None
    tensor_table: Table | None


def chosen(plan: Plan | str, task: Task, sample_batch: Any) -> Plan | str:
    """Return the plan; or, where it begins with `auto`, the one that is chosen for these ranks."""
    if not (isinstance(plan, str) and is_request(plan)):
        return plan
    request = Request.parse(plan)
    if sample_batch is None:
        raise UserError(
            f"plan '{plan}': the planner must know the batch of a step, over all replicas; give parallelize "
            "one, like sample_batch=(inputs, targets)"
        )
    join()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if request.ranks not in (None, ranks):
        raise UserError(f"plan '{plan}': is for {request.ranks} ranks, and {ranks} are running; drop ranks=")
    report = report_of_rank()

    def decide(reports: list[dict[str, Any]]) -> list[str]:
        with host_work("the choice of a plan"):
            shape, batch = shape_of_sample(task, sample_batch)
            found = choose(shape, cluster_of_reports(reports), batch, request, partial(refusal, task))
            return [found.plan, found.why]

    text, why = agree_on_every_rank(lambda: report, decide)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"echelon: {why}", file=sys.stderr, flush=True)
    return str(text)


def shape_of_sample(task: Task, sample_batch: Any) -> tuple[ModelShape, int]:
    """The shape of the model for sequences as long as those of a batch, and how many these are."""
    from echelon.planner.shape.module import shape_of_module  # a second of torch, for this plan alone

    plan = Plan()
    loss = choose_loss(task.model, task.loss, plan, task.objective)
    inputs, targets = read_sample(task.model, plan, loss, sample_batch) or (None, None)
    given = inputs if isinstance(inputs, Inputs) else Inputs(inputs)
    name = type(task.model).__name__
    shape = shape_of_module(task.model, *given.args, name=name, named=given.kwargs)
    tokens = [each for each in (*given.args, *given.kwargs.values()) if isinstance(each, Tensor)]
    lengths = [each.shape[1] for each in tokens if each.ndim > 1 and not each.is_floating_point()]
    shape = replace(shape, sequence=lengths[0]) if lengths else shape
    return shape, num_samples((inputs, targets))


def refusal(task: Task, text: str) -> str | None:
    """Why the model cannot be divided as a plan says, if so: found on a copy without memory."""
    from echelon.engine.dry_run.dry_run import EqualMesh  # which imports parallelize

    try:
        plan = Plan.parse(text)
        model = without_memory(task.model)
        with Wrapping() as wrapping:
            model, plan, loss = accept_model(
                model, plan, task.loss, None, None, task.objective, task.layers, wrapping
            )
            mesh = EqualMesh.pretend(plan, 0)
            key_dropout(model, wrapping)
            sharding = LayerSharding(model, mesh, loss, task.tensor_table, wrapping)
            split = split_stages(model, mesh, None, by_layers=sharding.by_layers)
            BatchReader(model, plan, loss, by_layers=split.by_layers)
    except UserError as error:
        return "; ".join(error.errors) or error.title
    return None


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers have shapes alone."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)
