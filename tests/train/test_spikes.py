"""Losses that jump."""

import math

import pytest

from echelon.train.spikes import SpikeWatch, Trouble


def test_a_loss_is_judged_by_the_median_of_those_before_it() -> None:
    watch = SpikeWatch(4.0, 5)
    assert [watch.judge(step, loss) for step, loss in enumerate([3.1, 3.0, 2.9, 3.0, 2.9], 1)] == [None] * 5
    assert watch.judge(6, 12.0) is None, "4 × 3.0, and not more"
    assert watch.judge(7, 12.1) == Trouble(
        7, 7, "the loss of step 7, 12.1, is more than 4 × 3, the median of the last 5"
    )
    assert watch.as_plain() == [3.0, 2.9, 3.0, 2.9, 12.0], "a spike is not among them"


def test_nothing_is_judged_before_there_are_enough() -> None:
    watch = SpikeWatch(2.0, 3)
    assert watch.judge(1, 1.0) is None
    assert watch.judge(2, 1000.0) is None
    assert watch.judge(3, 1.0) is None
    assert watch.judge(4, 2.5) is not None


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_always_one(loss: float) -> None:
    trouble = SpikeWatch(2.0, 3).judge(1, loss)
    assert trouble is not None
    assert trouble.reason == f"the loss of step 1 is {loss:g}"


def test_without_a_factor_nothing_is() -> None:
    watch = SpikeWatch(0.0, 1)
    assert [watch.judge(step, loss) for step, loss in enumerate([1.0, 1e9, math.nan])] == [None] * 3
    assert not watch.is_on


def test_a_training_that_goes_on_judges_as_before() -> None:
    watch, again = SpikeWatch(2.0, 3), SpikeWatch(2.0, 3)
    for step in range(3):
        watch.judge(step, 1.0)
    again.restore(watch.as_plain())
    assert again.judge(4, 3.0) == watch.judge(4, 3.0) is not None
    again.restore([1.0, "2", None, math.nan, True, 1, 1.0])
    assert again.as_plain() == [1.0, 1.0, 1.0]
    again.restore({"from": "a stranger"})
    assert again.as_plain() == []
