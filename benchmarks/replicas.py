"""The contenders of the bench `data-parallel`, as they run in a rank: one training, sharded in many ways.

Each step does: forward, mean loss, backward, AdamW; no clipping, because peers would pay for a norm that
echelon computes anyway. Every peer is set up as its documentation advises for speed. Models start from the
same weights and ranks train on different data.
"""

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from echelon.engine import Engine, parallelize
from echelon.models import ModelConfig, cross_entropy
from echelon.plan import Plan
from echelon.train.rehearsal import Batch, make_model

Step = Callable[[Batch], float]  # trains on a batch; returns its loss
MakeStep = Callable[[ModelConfig], Step]

_ADAMW: dict[str, Any] = {"lr": 3e-4, "fused": True}


class Peer(NamedTuple):
    """Another library that does what echelon does at one level of ZeRO."""

    name: str
    level: int
    package: str
    make_step: MakeStep

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None


def peers() -> list[Peer]:
    """Every peer that the bench knows, by level, including those of packages that are not installed."""
    return [
        Peer("torch DDP", 0, "torch", _ddp_step),
        Peer("torch ZeRO-1", 1, "torch", _zero_redundancy_step),
        Peer("DeepSpeed stage 1", 1, "deepspeed", partial(_deepspeed_step, stage=1)),
        Peer("torch FSDP2, kept", 2, "torch", partial(_fsdp_step, free=False)),
        Peer("DeepSpeed stage 2", 2, "deepspeed", partial(_deepspeed_step, stage=2)),
        Peer("torch FSDP2", 3, "torch", partial(_fsdp_step, free=True)),
        Peer("DeepSpeed stage 3", 3, "deepspeed", partial(_deepspeed_step, stage=3)),
    ]


def make_engine(config: ModelConfig, level: int) -> Engine:
    """`parallelize` over all ranks."""
    plan = Plan(data=dist.get_world_size(), zero=level)
    return parallelize(make_model(config), plan, optimizer=_adamw, loss=cross_entropy)


def compute_only_step(config: ModelConfig) -> Step:
    """No communication: every rank trains its own model. The others cannot be faster."""
    model = make_model(config)
    return _loop(model, _adamw(model.parameters()))


def _ddp_step(config: ModelConfig) -> Step:
    model = _ddp(config)
    return _loop(model, _adamw(model.parameters()))


def _zero_redundancy_step(config: ModelConfig) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _ddp(config)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **_ADAMW
    )
    return _loop(model, optimizer)


def _fsdp_step(config: ModelConfig, *, free: bool) -> Step:
    """Each block is a unit, the rest another. Without `free`, units stay gathered until the backward."""
    from torch.distributed.fsdp import fully_shard

    model = make_model(config)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=free)
    fully_shard(model, reshard_after_forward=free)
    return _loop(model, _adamw(model.parameters()))


def _deepspeed_step(config: ModelConfig, *, stage: int) -> Step:
    model = make_model(config)
    deepspeed = import_module("deepspeed")
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # only scales what DeepSpeed logs
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # by default it clips at a norm of 1
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
    }
    engine: Any = deepspeed.initialize(
        model=model, optimizer=_adamw(model.parameters()), config=settings, dist_init_required=False
    )[0]

    def step(batch: Batch) -> float:
        loss = _mean_loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The usual training loop."""

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        loss = _mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _ddp(config: ModelConfig) -> DistributedDataParallel:
    return DistributedDataParallel(make_model(config), gradient_as_bucket_view=True)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **_ADAMW)
