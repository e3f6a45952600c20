"""The limits of this machine for a job: as many ranks as its plan has, and their weights in host memory.

The memory is what a rank cannot do without, by arithmetic, before anything is allocated. Activations, buffers
and the process itself come on top, so a job that passes may still be too large, but one that is refused
cannot run.
"""

import dataclasses
import os
from typing import NamedTuple

import torch

from echelon import models
from echelon.errors import UserError
from echelon.hardware import available_memory
from echelon.launching.torchrun import is_under_torchrun
from echelon.nn.batch import DTYPES
from echelon.plan import AUTO, Plan
from echelon.quantities import show_bytes
from echelon.train.jobs.job import Job

Config = models.ModelConfig | models.ImageConfig

RANKS_PER_CORE = 64  # more processes only fill the machine


def rank_error(plan: Plan) -> str | None:
    """Why the ranks of `plan` are not those that are running, or too many to start."""
    if is_under_torchrun():
        return _error_under_torchrun(plan)
    most = most_ranks_here()
    if plan.pipeline == AUTO or plan.ranks <= most:
        return None
    return (
        f"plan '{plan}': needs {plan.ranks} ranks, but this machine ({os.cpu_count() or 1} cores) starts at "
        f"most {most}; use fewer ranks, start them on several machines with torchrun, or add --elastic, "
        "which shrinks data= to what fits"
    )


def ranks_on_this_host(ranks: int) -> int:
    """Return how many of `ranks` ranks run on this machine; at least 1, where the launcher does not say."""
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", 1))) if is_under_torchrun() else ranks


def most_ranks_here() -> int:
    return RANKS_PER_CORE * (os.cpu_count() or 1)


def _error_under_torchrun(plan: Plan) -> str | None:
    running = int(os.environ["WORLD_SIZE"])
    others = plan.data * plan.tensor * plan.context
    if plan.pipeline == AUTO and running % others:
        return (
            f"plan '{plan}': torchrun started {running} ranks, and the pipeline takes what data × tensor × "
            f"context = {others} leaves; start a multiple of {others}"
        )
    if plan.pipeline == AUTO or plan.ranks == running:
        return None
    others = plan.ranks // plan.data
    can_shrink = running < plan.ranks and running % others == 0
    elastic = f"; or add --elastic, which trains with data={running // others} and the same global batch"
    return (
        f"plan '{plan}': needs {plan.ranks} ranks, but torchrun started {running}; start torchrun with "
        f"{plan.ranks} processes in total, or change the plan{elastic if can_shrink else ''}"
    )


_STATES = {"adamw": 2, "sgd": 1, "sm3": 1, "adafactor": 0}  # tensors of optimizer state per weight


class RankBytes(NamedTuple):
    """Return the bytes that one rank holds between steps, on average over the stages."""

    weights: float
    gradients: float
    optimizer: float  # with float32 masters, below float32

    @property
    def total(self) -> float:
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in self._asdict().items() if size)
        return f"{show_bytes(self.total)} ({parts})"


def num_states(job: Job) -> int:
    """Return the number of state tensors that are kept for each weight: the optimizer's, and the average."""
    optimizer, averages = job.optimizer, int(job.average is not None)
    is_momentum = optimizer.name in ("sgd", "sm3")
    states = 0 if is_momentum and not optimizer.momentum else _STATES.get(optimizer.name, 0)
    return states + averages


def rank_bytes(parameters: int, plan: Plan, states: int, routed: int = 0) -> RankBytes:
    """The bytes of a rank, for a model of so many parameters and an optimizer of so many states.

    `routed` of the parameters are experts that gates choose from, which `expert` ranks divide.
    """
    if plan.expert == 1 or plan.pipeline == AUTO:
        return _even_bytes(parameters, plan, states, 1)
    dense = _even_bytes(parameters - routed, plan, states, 1)
    experts = _even_bytes(routed / plan.expert, plan, states, plan.expert)
    return RankBytes(*(sum(pair) for pair in zip(dense, experts, strict=True)))


def _even_bytes(parameters: float, plan: Plan, states: int, expert: int) -> RankBytes:
    """Return the bytes for parameters that all replicas hold, or every `expert`-th of them."""
    size = DTYPES[plan.precision].itemsize
    if plan.pipeline == AUTO:  # every rank measures the whole model first
        return RankBytes(parameters * size, 0, 0)
    held = parameters / (plan.stages * plan.tensor)
    holders = plan.shard or max(plan.replicas) * plan.data * plan.context
    holders = max(1, holders // expert)
    parts = [holders if plan.zero >= level else 1 for level in (3, 2, 1)]
    if plan.sync != "all-reduce":  # the server has the only optimizer
        parts[2] = holders
    state = states * max(4, size) + (4 if size < 4 else 0)
    return RankBytes(held * size / parts[0], held * size / parts[1], held * state / parts[2])


def host_memory_errors(job: Job, config: Config, plan: Plan, ranks: int) -> list[str]:
    """An error if the ranks of this machine need more memory together than it has. GPUs have their own."""
    free = available_memory()
    if free is None or torch.cuda.device_count() >= ranks:
        return []
    needed = _needed(job, config, plan)
    if needed.total * ranks <= free:
        return []
    each = f"{needed} on each of {ranks} ranks here" if ranks > 1 else str(needed)
    return [
        f"plan '{plan}': {models.num_parameters(config):,} parameters take at least {each}, and this machine "
        f"has {show_bytes(free)} of memory free; {_fix(job, config, plan, free / ranks)}"
    ]


def refuse_small_device(job: Job, config: Config, device: torch.device) -> None:
    """Raise if this rank's part does not fit into its GPU; called in the rank, which has the device."""
    if device.type != "cuda":
        return
    free, plan = torch.cuda.mem_get_info(device)[0], Plan.parse(job.plan)
    needed = _needed(job, config, plan)
    if "parameters" in plan.offload:  # they are in host memory
        needed = needed._replace(weights=0)
    if needed.total > free:
        raise UserError(
            f"plan '{plan}': {models.num_parameters(config):,} parameters take at least {needed} on each "
            f"rank, and {torch.cuda.get_device_name(device)} has {show_bytes(free)} free; "
            f"{_fix(job, config, plan, free)}"
        )


def state_bytes(job: Job, config: Config) -> float:
    """Return the bytes that a rank must keep to go on, at least: weights and the optimizer's state."""
    needed = _needed(job, config, Plan.parse(job.plan))
    return needed.weights + needed.optimizer


def _needed(job: Job, config: Config, plan: Plan) -> RankBytes:
    routed = config.num_routed_parameters if isinstance(config, models.ModelConfig) else 0
    return rank_bytes(models.num_parameters(config), plan, num_states(job), routed)


def _fix(job: Job, config: Config, plan: Plan, free: float) -> str:
    """Name what fits into `free` bytes per rank: another level of ZeRO, or a smaller model."""
    states = num_states(job)
    for zero in range(plan.zero + 1, 4) if plan.pipeline != AUTO else ():
        try:
            sharded = dataclasses.replace(plan, zero=zero)
        except UserError:  # the plan cannot have it
            continue
        if _needed(job, config, sharded).total <= free:
            return f"add zero={zero} to the plan, which shards them"
    if isinstance(config, models.ModelConfig):
        sizes = {name: models.preset(name).num_parameters for name in models.presets()}
    else:
        sizes = {name: models.num_parameters(models.image_preset(name)) for name in models.image_presets()}
    fitting = {name: size for name, size in sizes.items() if rank_bytes(size, plan, states).total <= free}
    smaller = max(fitting, key=lambda name: fitting[name], default=None)
    model = "a smaller model" if smaller is None else f"a smaller model (the preset {smaller} fits)"
    return f"use {model}, or more ranks on other machines with torchrun (tensor, pipeline, zero=3)"
