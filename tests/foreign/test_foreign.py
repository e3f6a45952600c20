"""Models that nobody here wrote, under every plan that has a meaning for them: equal, or refused.

Each training ends in one of two ways: equal to the plain loop up to 1e-9, or refused before the first update,
on every rank, for a reason that REFUSALS lists. What is not listed there must be equal.
"""

from typing import Any

import pytest

from echelon.plan import Plan
from tests.foreign.language import LANGUAGE
from tests.foreign.oddities import ODDITIES
from tests.foreign.proof import Foreign, prove
from tests.foreign.refusals import expected_refusal
from tests.foreign.vision import VISION

CASES: dict[str, Foreign] = {**LANGUAGE, **VISION, **ODDITIES}
PLANS = [
    "data=2",
    "data=2 zero=1",
    "data=2 zero=2 microbatches=2",
    "data=2 zero=3",
    "pipeline=2 microbatches=2",
    "tensor=2",
    "context=2",
]

# Some of them in every run, each with the plan at which it once failed, or which is the hardest for it.
ALWAYS = [
    ("gemma", "data=2 zero=3"),
    ("bloom", "tensor=2"),
    ("phi3", "tensor=2"),
    ("gpt_neox", "pipeline=2 microbatches=2"),
    ("bert", "data=2 zero=2 microbatches=2"),
    ("t5", "data=2 zero=3"),
    ("convnext", "data=2"),
    ("reads the table", "data=2 zero=3"),
    ("clamps", "data=2"),
    ("makes weights", "recompute=full"),
    ("contrastive", "data=2"),
    ("sparse buffers", "recompute=full offload=optimizer,parameters,activations"),
    ("sparse buffers", "schedule=gpipe microbatches=2 compress=gist update=last-backward"),
    ("sparse buffers", "data=2"),
]


def check(name: str, plan: str, warm_ranks: Any) -> None:
    refusal = prove(CASES[name], plan, warm_ranks(Plan.parse(plan).ranks))
    expected = expected_refusal(name, plan)
    if refusal is None:
        assert expected is None, f"it is equal now: take it off the list of refusals ({expected!r})"
    else:
        assert expected is not None, f"refused: {refusal}"
        assert expected in refusal


@pytest.mark.slow_cases("convnext-data=2", "gemma-data=2 zero=3", "phi3-tensor=2", "t5-data=2 zero=3")
@pytest.mark.parametrize(("name", "plan"), ALWAYS)
def test_some_of_them_are_equal_or_refused(name: str, plan: str, warm_ranks: Any) -> None:
    check(name, plan, warm_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, plan) for name in sorted(CASES) for plan in PLANS],
)
def test_all_of_them_are_equal_or_refused(name: str, plan: str, warm_ranks: Any) -> None:
    check(name, plan, warm_ranks)


def test_there_are_at_least_thirty_families() -> None:
    assert len(CASES) >= 30
