"""The batches of a job: for training, and for validation if the corpus has enough text."""

from functools import partial
from typing import TYPE_CHECKING

from echelon.data import Batches, Corpus, num_windows
from echelon.plan import Plan

if TYPE_CHECKING:
    from echelon.train.jobs.job import Job


def make_batches(job: "Job", corpus: Corpus) -> tuple[Batches, Batches | None]:
    """The batches to train on, and those to validate on.

    A validation split that is shorter than one training batch makes one smaller batch. With less than a
    sample per replica (or validation_fraction=0) there is no validation.
    """
    sequence, fraction = job.sequence_length, job.data.validation_fraction
    make = partial(Batches, corpus, sequence=sequence, seed=job.seed, validation_fraction=fraction)
    training = make(batch=job.batch)
    size = min(job.batch, num_windows(len(corpus), sequence, "validation", fraction))
    if size < Plan.parse(job.plan).data:
        return training, None
    return training, make(batch=size, split="validation")
