"""Numbers that are not finite end a training, with what to change."""

import math

import pytest

from echelon.errors import UserError
from echelon.train.jobs.job import Job, OptimizerJob
from echelon.train.loop import refuse_divergence


def test_finite_numbers_pass() -> None:
    refuse_divergence(Job(), 3, loss=1e30, gradient_norm=0.0, validation_loss=-1.0)


@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")]
)
def test_every_number_that_must_be_finite(value: float, word: str) -> None:
    refuse_divergence(Job(), 3, loss=1.0)
    with pytest.raises(UserError, match=f"the gradient norm became {word} at step 3; .*clip .now 1.0"):
        refuse_divergence(Job(), 3, loss=1.0, gradient_norm=value)
    with pytest.raises(UserError, match=f"the validation loss became {word} at step 7; "):
        refuse_divergence(Job(), 7, validation_loss=value)


def test_the_fixes_name_the_values_of_the_job() -> None:
    job = Job(steps=50, optimizer=OptimizerJob(learning_rate=0.5, clip=None))
    with pytest.raises(UserError) as caught:
        refuse_divergence(job, 1, loss=math.nan)
    assert str(caught.value) == (
        "the loss became NaN at step 1; lower optimizer.learning_rate (now 0.5), or set optimizer.clip=1.0, "
        "or raise optimizer.warmup (now 5 steps)"
    )
