"""Deceptive models under plans that they might break: equal to the plain loop, or refused."""

import warnings
from typing import Any

import pytest

from echelon.plan import Plan
from tests.foreign.deceptive import DECEPTIVE, train_deceptive
from tests.foreign.proof import judge

PLANS = [
    "data=2",
    "data=2 zero=3",
    "microbatches=2",
    "data=2 microbatches=2 zero=1",
    "pipeline=2 microbatches=2",
    "pipeline=2 schedule=gpipe microbatches=4",
    "update=last-backward microbatches=2",
]

# What must train: nothing of these models is mixed, or the plan does not cut what they mix.
EQUAL = {
    ("gradient penalty", "data=2"),
    ("gradient penalty", "microbatches=2"),
    ("keeps its state", "data=2"),
    ("an equilibrium", "data=2"),
    ("auxiliary loss of the first layer", "data=2"),
    ("auxiliary loss of the last layer", "pipeline=2 microbatches=2"),
}
ALWAYS = [
    ("mask of floats, third batch", "data=2"),
    ("ignores a class", "microbatches=2"),
    ("mask beside zeros", "microbatches=2"),
    ("weights of samples", "data=2"),
    ("leaves out outliers", "microbatches=2"),
    ("leaves out infinity", "pipeline=2 microbatches=2"),
    ("centres large inputs", "data=2"),
    ("centres gradients", "data=2 zero=3"),
    ("gradient penalty", "data=2"),
    ("keeps its state", "data=2"),
    ("a backward pass in the loss", "data=2 zero=3"),
    ("an equilibrium", "data=2 zero=3"),
    ("norm beside noise", "data=2"),
    ("auxiliary loss of the first layer", "pipeline=2 microbatches=2"),
]


def check(name: str, plan: str, warm_ranks: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        results = warm_ranks(Plan.parse(plan).ranks).run(train_deceptive, name, plan)
    refusal = judge(DECEPTIVE[name], results)
    if (name, plan) in EQUAL:
        assert refusal is None, refusal


@pytest.mark.parametrize(("name", "plan"), ALWAYS)
def test_some_are_equal_or_refused(name: str, plan: str, warm_ranks: Any) -> None:
    check(name, plan, warm_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name in DECEPTIVE for plan in PLANS])
def test_all_are_equal_or_refused(name: str, plan: str, warm_ranks: Any) -> None:
    check(name, plan, warm_ranks)
