"""The contenders of the bench `step`, as they run in a rank: the same training in echelon and in plain torch.

Each step does: forward, mean loss, backward, gradient norm, clip, AdamW. Models start from the same weights,
so the contenders' losses agree, which a test checks.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from echelon.engine import parallelize
from echelon.models import ModelConfig, cross_entropy
from echelon.plan import Plan
from echelon.train.rehearsal import Batch, make_model

CLIP = 1.0

Step = Callable[[Batch], tuple[float, float]]  # trains on a batch; returns its loss and gradient norm


def echelon_step(config: ModelConfig) -> Step:
    """`parallelize` over all ranks."""
    plan = Plan(data=dist.get_world_size())
    engine = parallelize(make_model(config), plan, optimizer=_adamw, loss=cross_entropy, clip=CLIP)

    def step(batch: Batch) -> tuple[float, float]:
        metrics = engine.step(batch)
        return metrics.loss, metrics.grad_norm

    return step


def torch_step(config: ModelConfig) -> Step:
    """The usual training loop; with several ranks, around DistributedDataParallel."""
    model: nn.Module = make_model(config)
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    parameters = list(model.parameters())
    optimizer = _adamw(parameters)

    def step(batch: Batch) -> tuple[float, float]:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.item(), norm.item()

    return step


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)
