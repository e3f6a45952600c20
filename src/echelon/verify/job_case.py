"""The verification case of a training job: its model, data and optimizer, at a size that proves enough.

A shorter sequence and a smaller batch than the job trains with run the same code on the same weights.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from torch import nn

from echelon.engine.auto import ranks_here
from echelon.errors import UserError
from echelon.hardware import available_memory
from echelon.models import ImageConfig, ModelConfig, build, build_image, load_hf, load_image, num_parameters
from echelon.plan import Plan
from echelon.quantities import show_bytes
from echelon.train.jobs.job import Job
from echelon.train.jobs.machine_fit import num_states, rank_bytes
from echelon.train.task import Task, open_task
from echelon.update.optim.optimizers import make_optimizer
from echelon.verify.case import Case

SEQUENCE = 32


@dataclass(frozen=True)
class JobBatches:
    """The global batches of a job's data; each process opens the data for itself, once."""

    job: Job

    def __call__(self, step: int) -> tuple[Any, Any]:
        return _open(self.job).training.at(step)


@lru_cache(maxsize=1)
def _open(job: Job) -> Task:
    return open_task(job)


def case_of(job: Job, plan: Plan, steps: int) -> Case:
    """The case of `job` under `plan`; refused here, not in a rank, where corpus or memory are too small."""
    _refuse_small_memory(job, plan)
    # 8 samples or more, and one more than replicas and microbatches share evenly: means must be weighed.
    # One more for each replica where asynchronous workers drop: they number samples as if all had as many.
    parts, drops = plan.data * plan.microbatches, _sizes(job).dropout > 0 and plan.sync == "async"
    smaller = replace(job, batch=parts * math.ceil(7 / parts) + (plan.data if drops else 1))
    if job.task == "language":
        smaller = replace(smaller, sequence=min(job.sequence_length, SEQUENCE))
    task = _open(smaller)
    weights = job.model.weights
    options = {name: getattr(job, name) for name in ("loss_scale", "average", "layers")}
    return Case(
        make_model=partial(_build, task.config) if weights is None else partial(_load, task.config, weights),
        make_batch=JobBatches(smaller),
        loss=task.loss,
        make_optimizer=partial(make_optimizer, job.optimizer),
        steps=steps,
        clip=job.optimizer.clip,
        seed=job.seed,
        options={name: value for name, value in options.items() if value is not None},
    )


def _refuse_small_memory(job: Job, plan: Plan) -> None:
    """Ranks start from whole models in float64. Then one process holds their result, and trains too."""
    parameters, states, ranks = num_parameters(_sizes(job)), num_states(job), ranks_here(plan)
    copies = max(ranks, 3 + 2 * states)
    trained = rank_bytes(parameters, replace(plan, precision="fp64", gradients="fp32"), states).total * ranks
    needed, free = max(8 * parameters * copies, trained), available_memory()
    if free is not None and needed > free:
        raise UserError(
            f"verify '{plan}': {parameters:,} parameters in float64 take at least {show_bytes(needed)} on "
            f"{ranks} ranks and one device, and this machine has {show_bytes(free)} of memory free; verify a "
            "smaller model of the same kind, like --set model.layers=2: the plan runs the same code"
        )


def _sizes(job: Job) -> ModelConfig | ImageConfig:
    """Return the sizes of the model; of images, for the classes of the preset."""
    return job.model.image_config() if job.task == "images" else job.model.config()


def _build(config: ModelConfig | ImageConfig) -> nn.Module:
    return build(config) if isinstance(config, ModelConfig) else build_image(config)


def _load(config: ModelConfig | ImageConfig, weights: str) -> nn.Module:
    return load_hf(weights) if isinstance(config, ModelConfig) else load_image(weights)
