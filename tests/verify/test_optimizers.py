"""Optimizers that need more than single elements are equal to one device, whoever holds the parameters."""

from dataclasses import replace
from functools import partial

import pytest

from echelon.verify import Case, assert_equal
from tests.cases import perceptron_case
from tests.contract_models import CASES
from tests.update.optim import sum_cases, whole_cases

SUMS, WHOLE = tuple(sum_cases.OPTIMIZERS), tuple(whole_cases.OPTIMIZERS)
_ZERO = [f"data={data} zero={level}" for data in (2, 3) for level in range(4)]
_OTHERS = [
    "tensor=2",
    "tensor=2 sequence=true",
    "pipeline=2 microbatches=2",
    "context=2 zero=1",
    "data=4 shard=2 zero=3",
    "data=2 tensor=2 zero=3",
    "data=2 tensor=2 pipeline=2 zero=1 microbatches=2",
    "pipeline=2-1 zero=1 microbatches=4",
    "pipeline=2 schedule=pipedream microbatches=2",
    "data=2 tensor=2 sync=parameter-server",
    "data=2 sync=async staleness=1",
    "precision=bf16 data=2 zero=2",
    "precision=bf16 tensor=2",
]


def case_of(model: str, optimizer: str, plan: str) -> Case:
    """A model of `contract_models`, or the perceptron, whose rows the parts of ranks cut in two."""
    case = perceptron_case() if model == "perceptron" else CASES[model]
    make = sum_cases.make_optimizer if optimizer in SUMS else whole_cases.make_optimizer
    clip = None if "pipedream" in plan else case.clip
    return replace(case, make_optimizer=partial(make, optimizer), clip=clip)


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("gpt-tensor=2-adafactor", "gpt-tensor=2-sm3")
@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize("optimizer", SUMS)
@pytest.mark.parametrize(("model", "plan"), [("perceptron", "data=3 zero=1"), ("gpt", "tensor=2")])
def test_sums_over_rows_and_columns(optimizer: str, model: str, plan: str) -> None:
    assert_equal(case_of(model, optimizer, plan), plan)


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize(
    ("optimizer", "model", "plan"),
    [("muon", "gpt", "data=2 zero=3"), ("lamb", "perceptron", "data=2 zero=1")],
)
def test_whole_parameters(optimizer: str, model: str, plan: str) -> None:
    assert_equal(case_of(model, optimizer, plan), plan)


def _fits(model: str, plan: str) -> bool:
    """The weights of gpt are tied, which these plans refuse."""
    return model != "gpt" or not any(words in plan for words in ("pipedream", "2-1 zero=1"))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [*SUMS, *WHOLE])
@pytest.mark.parametrize(
    ("plan", "model"),
    [
        (plan, model)
        for plan in [*_ZERO, *_OTHERS]
        for model in ("gpt", "llama", "perceptron")
        if _fits(model, plan)
    ],
)
def test_every_optimizer_under_every_axis(optimizer: str, model: str, plan: str) -> None:
    if model == "perceptron" and plan not in _ZERO:
        plan = "data=4 shard=2 zero=1"  # it lists no layers
    assert_equal(case_of(model, optimizer, plan), plan)
