"""The verification case of a training job: its model, data and optimizer, at a size that proves enough.

A shorter sequence and a smaller batch than the job trains with run the same code on the same weights.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from echelon.data import Batches, open_corpus
from echelon.models import build, cross_entropy
from echelon.optim.optimizers import make_optimizer
from echelon.plan import Plan
from echelon.train.job import Job
from echelon.verify.contract import Case

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
    return Batches(corpus, batches.batch, batches.sequence, job.seed)


def case_of(job: Job, plan: Plan, steps: int) -> Case:
    """At least 8 samples, and enough that every microbatch of every replica has one."""
    sequence = min(job.sequence_length, SEQUENCE)
    return Case(
        make_model=partial(build, job.model.config()),
        make_batch=JobBatches(job, max(8, plan.data * plan.microbatches), sequence),
        loss=cross_entropy,
        make_optimizer=partial(make_optimizer, job.optimizer),
        steps=steps,
        clip=job.optimizer.clip,
        seed=job.seed,
    )
