"""Every schedule over every pipeline is equal to one device, or to its formula.

A few of each here; all of them, against every number of replicas and level of ZeRO, by `make fuzz`.
"""

import itertools
from collections.abc import Iterator

import pytest

from echelon.plan import Plan
from echelon.verify import Case, assert_equal
from tests.parallel.pipeline.models import (
    asynchronous_case,
    deep,
    dropping,
    dropping_deep,
    gpt_case,
    untied,
    untied_deep,
    untied_dropping,
)

pytestmark = pytest.mark.usefixtures("warm_contract")

FLUSHED = ("naive", "gpipe", "1f1b", "zero-bubble")
STAGES, MICROBATCHES = (2, 3, 4), (1, 2, 4, 7)
REPLICAS = ("data=1", "data=2", "data=2 zero=1", "data=2 zero=2")


def flushed_plans() -> Iterator[str]:
    for schedule, stages, number in itertools.product(FLUSHED, STAGES, MICROBATCHES):
        yield f"pipeline={stages} schedule={schedule} microbatches={number}"
    for chunks, stages, rounds in itertools.product((2, 3), STAGES, (1, 2)):
        yield f"pipeline={stages} schedule=interleaved chunks={chunks} microbatches={stages * rounds}"


def uneven_plans() -> Iterator[str]:
    for stages, schedule, number in itertools.product(("3-1", "2-1-1"), FLUSHED, MICROBATCHES):
        yield f"pipeline={stages} schedule={schedule} microbatches={number}"


def asynchronous_plans() -> Iterator[str]:
    for schedule, stages, number in itertools.product(
        ("pipedream", "pipedream-vertical", "pipedream-2bw"), STAGES, range(1, 8)
    ):
        if schedule != "pipedream-2bw" or number >= stages:
            yield f"pipeline={stages} schedule={schedule} microbatches={number}"


def prove(case: Case, plan: str) -> None:
    verdict = assert_equal(case, plan)
    print(f"{verdict.worst[1]:.1e} {verdict.plan}")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("plan", list(flushed_plans()))
def test_flushed_pipelines_are_equal_to_one_device(plan: str, replicas: str) -> None:
    prove(gpt_case(deep), f"{plan} {replicas}")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [plan for plan in flushed_plans() if "zero-bubble" not in plan])
def test_flushed_pipelines_share_out_their_weights_too(plan: str) -> None:
    prove(gpt_case(deep), f"{plan} data=2 zero=3")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", ["data=1", "data=2"])
@pytest.mark.parametrize("plan", list(uneven_plans()))
def test_stages_with_different_replicas_are_equal_to_one_device(plan: str, replicas: str) -> None:
    prove(gpt_case(deep), f"{plan} {replicas}")


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("plan", list(uneven_plans()))
def test_and_share_out_what_is_not_tied(plan: str, data: int, zero: int) -> None:
    if zero == 2 and "naive" in plan:
        pytest.skip("a plan that is refused")
    prove(gpt_case(untied_deep), f"{plan} data={data} zero={zero}")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [*REPLICAS, "data=2 sync=parameter-server"])
@pytest.mark.parametrize("plan", list(asynchronous_plans()))
def test_pipelines_that_never_drain_are_equal_to_their_formula(plan: str, replicas: str) -> None:
    prove(asynchronous_case(untied_deep), f"{plan} {replicas}")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("schedule", [*FLUSHED, "interleaved chunks=2"])
def test_dropout_keeps_the_contract(schedule: str, replicas: str) -> None:
    prove(gpt_case(dropping_deep), f"pipeline=2 schedule={schedule} microbatches=4 {replicas}")


# A few of each, with few steps: plans that share no line of code that another of them does not run. Those
# that take longest of a kind by `make fuzz`.

FEW_FLUSHED = [
    "pipeline=2 schedule=naive microbatches=2",
    "pipeline=3 schedule=gpipe microbatches=7",
    pytest.param("pipeline=4 schedule=1f1b microbatches=2", marks=pytest.mark.slow),
    pytest.param("pipeline=2 schedule=1f1b microbatches=7 data=2 zero=2", marks=pytest.mark.slow),
    pytest.param(
        "pipeline=2 schedule=1f1b microbatches=4 data=2 sync=parameter-server", marks=pytest.mark.slow
    ),
    "pipeline=2 schedule=1f1b microbatches=4 data=2 zero=3",
    pytest.param(
        "pipeline=2 schedule=interleaved chunks=2 microbatches=4 data=2 zero=3", marks=pytest.mark.slow
    ),
    "pipeline=3 schedule=zero-bubble microbatches=4",
    "pipeline=3-1 schedule=1f1b microbatches=7",
]


@pytest.mark.slow_cases(
    "pipeline=2 schedule=1f1b microbatches=4 data=2 zero=3",
    "pipeline=2 schedule=naive microbatches=2",
    "pipeline=3 schedule=gpipe microbatches=7",
    "pipeline=3 schedule=zero-bubble microbatches=4",
)
@pytest.mark.parametrize("plan", FEW_FLUSHED)
def test_some_flushed_pipelines(plan: str) -> None:
    prove(gpt_case(steps=3), plan)


@pytest.mark.slow
def test_some_uneven_stages_that_share_out_their_state() -> None:
    prove(gpt_case(untied, steps=3), "pipeline=2-1 data=2 zero=2 microbatches=3")


@pytest.mark.slow_cases("pipeline=3 schedule=pipedream-vertical microbatches=3")
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("pipeline=4 schedule=pipedream microbatches=2", marks=pytest.mark.slow),
        pytest.param("pipeline=2 schedule=pipedream microbatches=7 data=2 zero=2", marks=pytest.mark.slow),
        "pipeline=3 schedule=pipedream-vertical microbatches=3",
        "pipeline=2 schedule=pipedream-2bw microbatches=2 data=2 sync=parameter-server",
    ],
)
def test_some_pipelines_that_never_drain(plan: str) -> None:
    updates = 20 if Plan.parse(plan).schedule != "pipedream-2bw" else 6
    steps = -(-updates // Plan.parse(plan).microbatches) if updates == 20 else updates
    prove(asynchronous_case(steps=steps), plan)


@pytest.mark.slow_cases("pipeline=2 schedule=interleaved chunks=3 microbatches=2")
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 schedule=1f1b microbatches=3",
        "pipeline=2 schedule=interleaved chunks=3 microbatches=2",
        pytest.param("pipeline=2 schedule=zero-bubble microbatches=3 data=2 zero=1", marks=pytest.mark.slow),
        pytest.param("pipeline=3-1 microbatches=4", marks=pytest.mark.slow),
    ],
)
def test_some_pipelines_with_dropout(plan: str) -> None:
    prove(gpt_case(dropping, steps=2), plan)


@pytest.mark.slow
def test_a_pipeline_that_never_drains_with_dropout() -> None:
    case = asynchronous_case(untied_dropping, steps=4)
    prove(case, "pipeline=3 schedule=pipedream microbatches=3")
