"""Plan "auto": the planner chooses for the model, the batch, the ranks and the devices that are there.

Each rank says what its device is, or measures it; rank 0 predicts every plan and asks, of a copy of the model
without memory, whether it can be divided so. All ranks get its answer, and rank 0 prints it.
"""

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives.agreement import agree_on_every_rank
from echelon.engine.model_checks import accept_model
from echelon.engine.stage_split import split_stages
from echelon.engine.step.batch_reader import BatchReader, read_sample
from echelon.errors import UserError
from echelon.launching import host_work, join
from echelon.nn.batch import Inputs, Objective, num_samples
from echelon.nn.dropout.modules import key_dropout
from echelon.nn.losses import Loss
from echelon.nn.wrapping import Wrapping
from echelon.parallel.layer_sharding import LayerSharding
from echelon.parallel.own_loss import choose_loss
from echelon.parallel.tensor.styles import Table
from echelon.plan import Plan
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cluster.here import cluster_of_reports, report_of_rank
from echelon.planner.searching.choice import choose
from echelon.planner.searching.request import Request, is_request
from echelon.planner.shape.shape import ModelShape


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
            return _decide(task, request, cluster_of_reports(reports), sample_batch)

    text, why = agree_on_every_rank(lambda: report, decide)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"echelon: {why}", file=sys.stderr, flush=True)
    return str(text)


def _decide(task: Task, request: Request, cluster: Cluster, sample_batch: Any) -> list[str]:
    shape, batch = shape_of_sample(task, sample_batch)
    found = choose(shape, cluster, batch, request, lambda text: refusal(task, text))
    return [found.plan, found.why]


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
    from echelon.engine.dry_run.pretended import EqualMesh  # which imports parallelize

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
