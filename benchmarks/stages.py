"""The contenders of the bench `pipeline`, as they run in a rank: one training in stages, by many schedules.

Each step does: forwards and backwards of all microbatches, mean loss, AdamW; no clipping, because peers would
pay for a norm that echelon computes anyway. All contenders split the model at the same layers and start from
the same weights. torch.distributed.pipelining is set up as its documentation says for losses that are summed:
each loss is divided at once, so that no pass over the gradients has to divide them.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.models import ModelConfig
from echelon.parallel.pipeline import even_boundaries
from echelon.plan import Plan
from echelon.train.rehearsal import Batch, fused_adamw, make_model

Step = Callable[[Batch], float | None]  # trains on a batch; returns its loss on the rank that has it

# By the name of the schedule: what torch.distributed.pipelining calls it.
PEERS: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}


def torch_step(config: ModelConfig, plan: Plan) -> Step:
    """The schedule of torch.distributed.pipelining that does what `plan` says."""
    from torch.distributed import pipelining

    rank, ranks = dist.get_rank(), dist.get_world_size()
    local_stages = range(rank, ranks * plan.chunks, ranks)
    modules = _cut(make_model(config), ranks * plan.chunks)
    optimizer = fused_adamw(parameter for stage in local_stages for parameter in modules[stage].parameters())
    stages = [
        pipelining.PipelineStage(modules[number], number, len(modules), _device(modules[number]))
        for number in local_stages
    ]
    schedule: Any = getattr(pipelining, PEERS[plan.schedule])(
        stages if plan.chunks > 1 else stages[0],
        plan.microbatches,
        loss_fn=_LossPart(plan.microbatches),
        scale_grads=False,
    )

    def step(batch: Batch) -> float | None:
        inputs, targets = batch
        losses: list[Tensor] = []
        optimizer.zero_grad()
        arguments = (inputs,) if rank == 0 else ()
        keywords = {"target": targets, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*arguments, **keywords, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).sum().item() if losses else None

    return step


class _LossPart:
    """A microbatch's part of the mean loss over all microbatches, which are equally large."""

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / self._microbatches


def _cut(model: nn.Module, stages: int) -> list[nn.Module]:
    """The model's layers in stages, split where echelon splits them."""
    layers: list[nn.Module] = model.layers()  # type: ignore[operator]
    edges = [0, *even_boundaries(model, stages), len(layers)]
    return [nn.Sequential(*layers[begin:end]) for begin, end in pairwise(edges)]


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
