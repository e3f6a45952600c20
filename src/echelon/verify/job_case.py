"""The verification case of a training job: its model, data and optimizer, at a size that proves enough.

A shorter sequence and a smaller batch than the job trains with run the same code on the same weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from torch import nn

from echelon.data import Batches, open_corpus
from echelon.models import build, cross_entropy, load_hf
from echelon.optim.optimizers import make_optimizer
from echelon.plan import Plan
from echelon.train.job import Job
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
    corpus = open_corpus(job.data.source, vocab=job.model.config().vocab, dtype=job.data.dtype)
    return Batches(
        corpus,
        batches.batch,
        batches.sequence,
        job.seed,
        validation_fraction=job.data.validation_fraction,
    )


def case_of(job: Job, plan: Plan, steps: int) -> Case:
    """The case of `job` under `plan`; refused here, not in a rank, where the corpus is too short for it."""
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
    )


def _model_maker(job: Job) -> Callable[[], nn.Module]:
    return partial(load_hf, job.model.weights) if job.model.weights else partial(build, job.model.config())


def _num_samples(plan: Plan, *, drops: bool = False) -> int:
    """8 or more, and one more than replicas and microbatches share evenly: their means must be weighed.

    One more for each replica where asynchronous workers drop: they number samples as if all had as many.
    """
    parts = plan.data * plan.microbatches
    return parts * math.ceil(7 / parts) + (plan.data if drops and plan.sync == "async" else 1)
