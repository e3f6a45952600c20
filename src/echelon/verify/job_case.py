"""The verification case of a training job: its model, data and optimizer, at a size that proves enough.

A shorter sequence and a smaller batch than the job trains with run the same code on the same weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from torch import nn

from echelon.data import Batches, open_corpus
from echelon.engine.auto import ranks_here
from echelon.errors import UserError
from echelon.hardware import available_memory
from echelon.models import build, cross_entropy, load_hf
from echelon.optim.optimizers import make_optimizer
from echelon.plan import Plan
from echelon.quantities import show_bytes
from echelon.train.job import Job
from echelon.train.memory_fit import num_states, rank_bytes
from echelon.verify.case import Case

SEQUENCE = 32


@dataclass(frozen=True)
class JobBatches:
    """The global batches of a job's data; each process opens the corpus for itself, once."""

    job: Job
    batch: int
    sequence: int

    def __call__(self, step: int) -> tuple[Any, Any]:
        return _open(self).at(step)


@lru_cache(maxsize=1)
def _open(batches: JobBatches) -> Batches:
    job = batches.job
    corpus = open_corpus(job.data.text_source, vocab=job.model.config().vocab, dtype=job.data.dtype)
    return Batches(
        corpus,
        batches.batch,
        batches.sequence,
        job.seed,
        validation_fraction=job.data.validation_fraction,
    )


def case_of(job: Job, plan: Plan, steps: int) -> Case:
    """The case of `job` under `plan`; refused here, not in a rank, where the corpus or the memory is too
    small for it."""
    if job.task != "language":
        raise UserError(
            f"verify with task={job.task}: only jobs of task=language are verified here; "
            "echelon.verify.assert_equal takes any model"
        )
    _refuse_small_memory(job, plan)
    sequence = min(job.sequence_length, SEQUENCE)
    batches = JobBatches(job, _num_samples(plan, drops=job.model.config().dropout > 0), sequence)
    _open(batches)
    return Case(
        make_model=_model_maker(job),
        make_batch=batches,
        loss=cross_entropy,
        make_optimizer=partial(make_optimizer, job.optimizer),
        steps=steps,
        clip=job.optimizer.clip,
        seed=job.seed,
        options={} if job.loss_scale is None else {"loss_scale": job.loss_scale},
    )


def _refuse_small_memory(job: Job, plan: Plan) -> None:
    """Ranks start from whole models in float64. Then one process holds their result, and trains too."""
    parameters, states, ranks = job.model.config().num_parameters, num_states(job.optimizer), ranks_here(plan)
    copies = max(ranks, 3 + 2 * states)
    trained = rank_bytes(parameters, replace(plan, precision="fp64", gradients="fp32"), states).total * ranks
    needed, free = max(8 * parameters * copies, trained), available_memory()
    if free is not None and needed > free:
        raise UserError(
            f"verify '{plan}': {parameters:,} parameters in float64 take at least {show_bytes(needed)} on "
            f"{ranks} ranks and one device, and this machine has {show_bytes(free)} of memory free; verify a "
            "smaller model of the same kind, like --set model.layers=2: the plan runs the same code"
        )


def _model_maker(job: Job) -> Callable[[], nn.Module]:
    return partial(load_hf, job.model.weights) if job.model.weights else partial(build, job.model.config())


def _num_samples(plan: Plan, *, drops: bool = False) -> int:
    """8 or more, and one more than replicas and microbatches share evenly: their means must be weighed.

    One more for each replica where asynchronous workers drop: they number samples as if all had as many.
    """
    parts = plan.data * plan.microbatches
    return parts * math.ceil(7 / parts) + (plan.data if drops and plan.sync == "async" else 1)
