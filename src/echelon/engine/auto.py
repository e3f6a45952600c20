"""`pipeline=auto`: the first rank measures the model's layers, and the planner splits them over all ranks.

What comes out is a plan without `auto`, and the boundaries of its stages. Ranks measure differently, so one
measures and broadcasts its answer. The bandwidth is that of a broadcast among all ranks, measured too.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives import Group, Ledger, group_over
from echelon.collectives.agreement import decide_on_rank_0
from echelon.collectives.mesh import this_device
from echelon.engine.step.feed import to_device
from echelon.errors import UserError
from echelon.launching import host_work
from echelon.nn.batch import DTYPES, Batch, cast, take_part
from echelon.plan import AUTO, Plan
from echelon.planner import partition, profile

_PROBE, _TIMES = 4 * 2**20, 5  # bytes, how often


class Resolved(NamedTuple):
    """A plan without `auto`, and before which layers its stages begin."""

    plan: Plan
    boundaries: Sequence[int] | None


def resolve(
    model: nn.Module, plan: Plan, sample_batch: Batch | None, boundaries: Sequence[int] | None
) -> Resolved:
    """Measure and split, on all ranks together; a plan that says its stages stays as it is."""
    if plan.pipeline != AUTO:
        return Resolved(plan, boundaries)
    if sample_batch is None:
        raise UserError(
            "pipeline=auto: measuring the layers takes a batch; give parallelize one, like "
            "sample_batch=(inputs, targets), or say the stages, like pipeline=2"
        )
    device = this_device()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    workers = _workers(plan, ranks)
    if workers == 1:
        return Resolved(dataclasses.replace(plan, pipeline=1), None)
    assert dist.group.WORLD is not None
    group = group_over("all", dist.group.WORLD, Ledger())
    bandwidth = _measure_bandwidth(group, device)
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
        return Resolved(dataclasses.replace(plan, pipeline=1, data=plan.data * replicas[0]), None)
    boundaries = [sum(layers[:number]) for number in range(1, len(layers))]
    return Resolved(dataclasses.replace(plan, pipeline=tuple(replicas)), boundaries)


def _measure_bandwidth(group: Group, device: torch.device) -> float:
    """Bytes per second of a large message between ranks."""
    message = torch.zeros(_PROBE, dtype=torch.uint8, device=device)
    group.broadcast(message)
    return _PROBE / statistics.median(_timed(group, message) for _ in range(_TIMES))


def _timed(group: Group, message: Tensor) -> float:
    group.barrier()
    start = time.perf_counter()
    group.broadcast(message)
    if message.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
