"""The batches of a job: the validation split may be short."""

import numpy as np
import pytest

from echelon.data import Corpus
from echelon.errors import UserError
from echelon.train.batches import make_batches
from echelon.train.jobs.job import DataJob, Job


def corpus(tokens: int) -> Corpus:
    return Corpus(np.zeros(tokens, dtype=np.uint8), 256, "zeros")


def job(plan: str = "data=2", fraction: float = 0.25) -> Job:
    return Job(plan=plan, batch=4, sequence=10, seed=3, data=DataJob(validation_fraction=fraction))


def test_both_splits_have_the_sizes_of_the_job() -> None:
    training, validation = make_batches(job(), corpus(1000))
    assert validation is not None
    assert (training.split, training.batch, training.sequence, training.seed) == ("train", 4, 10, 3)
    assert (validation.split, validation.batch, validation.sequence) == ("validation", 4, 10)
    assert (training.tokens, validation.tokens) == (750, 250)


def test_a_short_validation_split_has_a_smaller_batch() -> None:
    _, validation = make_batches(job(), corpus(124))  # 31 tokens: 3 windows
    assert validation is not None
    assert validation.batch == 3


@pytest.mark.parametrize(("plan", "validates"), [("data=1", True), ("data=2", True), ("data=3", False)])
def test_every_replica_needs_a_sample_of_a_validation_batch(plan: str, validates: bool) -> None:
    _, validation = make_batches(job(plan), corpus(84))  # 21 tokens: 2 windows
    assert (validation is not None) == validates


def test_without_a_fraction_there_is_no_validation() -> None:
    training, validation = make_batches(job(fraction=0.0), corpus(100))
    assert (training.tokens, validation) == (100, None)


def test_training_needs_a_whole_batch() -> None:
    with pytest.raises(UserError, match="the train split has 40 tokens"):
        make_batches(job(fraction=0.0), corpus(40))
