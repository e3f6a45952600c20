"""Tensor, sequence and context parallelism, alone and with every other axis, are equal to one device.

A few of each here; the rest by `make fuzz`.
"""

import itertools

import pytest

from echelon.verify import assert_equal
from tests.parallel.tensor.models import language_case

pytestmark = pytest.mark.usefixtures("warm_contract")

SCHEDULES = (
    "naive microbatches=2",
    "gpipe microbatches=3",
    "1f1b microbatches=4",
    "interleaved chunks=2 microbatches=2",
    "zero-bubble microbatches=3",
)


def prove(name: str, plan: str, steps: int = 20, clip: float | None = 1.0) -> None:
    verdict = assert_equal(language_case(name, steps, clip), plan)
    print(f"{verdict.worst[1]:.1e} {verdict.plan}")


@pytest.mark.slow_cases("gpt-2-true")
@pytest.mark.parametrize("sequence", ["false", "true"])
@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_tensor_ranks_are_equal_to_one_device(model: str, tensor: int, sequence: str) -> None:
    prove(model, f"tensor={tensor} sequence={sequence}")


@pytest.mark.parametrize("context", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_context_ranks_are_equal_to_one_device(model: str, context: int) -> None:
    prove(model, f"context={context}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "context=2",
        "context=2 zero=3",  # weights come and go also where no data rank shares them
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in [
                "context=4",  # with 4 key/value heads
                "context=2 tensor=2 sequence=true",
                "context=4 tensor=2",  # 2 key/value heads of each tensor rank for 4 ranks
                "context=2 pipeline=2 microbatches=2",
                "context=2 pipeline=2 schedule=zero-bubble microbatches=2",
                "context=2 data=2 zero=3",
                "context=2 pipeline=2 tensor=2 microbatches=2",
            ]
        ),
    ],
)
def test_ranks_that_attend_by_heads_are_equal_to_one_device(plan: str) -> None:
    prove("llama", f"{plan} attention=all-to-all", steps=8)


@pytest.mark.slow_cases("tensor=2")
@pytest.mark.parametrize(
    "plan",
    [
        "tensor=2",
        pytest.param("tensor=4 sequence=true", marks=pytest.mark.slow),
        "context=2",
        pytest.param("context=2 attention=all-to-all", marks=pytest.mark.slow),
    ],
)
def test_masks_of_dropout_do_not_depend_on_the_split(plan: str) -> None:
    prove("dropping", plan, steps=8)


@pytest.mark.slow_cases("zero-bubble microbatches=3")
@pytest.mark.parametrize(
    "schedule",
    [*(pytest.param(schedule, marks=pytest.mark.slow) for schedule in SCHEDULES[:-1]), SCHEDULES[-1]],
)
def test_three_axes_with_each_synchronous_schedule(schedule: str) -> None:
    prove("gpt", f"data=2 tensor=2 pipeline=2 schedule={schedule}", steps=8)


@pytest.mark.parametrize(
    "plan",
    [
        "data=2 tensor=2 zero=3 sequence=true",
        pytest.param("tensor=2 context=2 sequence=true data=2 zero=2", marks=pytest.mark.slow),
        pytest.param("pipeline=2 context=2 tensor=2 microbatches=2", marks=pytest.mark.slow),
        pytest.param("data=2 tensor=2 sync=parameter-server", marks=pytest.mark.slow),
        pytest.param("pipeline=2-1 tensor=2 microbatches=3", marks=pytest.mark.slow),
    ],
)
def test_axes_compose(plan: str) -> None:
    prove("dropping", plan, steps=8)


@pytest.mark.slow_cases("pipedream")
@pytest.mark.parametrize(
    "schedule",
    [
        "pipedream",
        pytest.param("pipedream-vertical", marks=pytest.mark.slow),
        pytest.param("pipedream-2bw", marks=pytest.mark.slow),
    ],
)
def test_pipelines_that_never_drain_have_tensor_ranks_too(schedule: str) -> None:
    prove("llama", f"pipeline=2 tensor=2 sequence=true microbatches=2 schedule={schedule}", 8, clip=None)


def everything() -> list[str]:
    axes = itertools.product(
        ("", "tensor=2", "tensor=2 sequence=true"),
        ("", "context=2"),
        ("", *(f"pipeline=2 schedule={schedule}" for schedule in SCHEDULES)),
        ("", "data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3"),
    )
    plans = [" ".join(filter(None, axis)) for axis in axes if axis[0] or axis[1]]
    return [
        plan
        for plan in plans
        if not ("zero=3" in plan and "zero-bubble" in plan)
        and 2 ** sum(f"{axis}=2" in plan for axis in ("tensor", "context", "pipeline", "data")) <= 8
    ]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama", "dropping"])
@pytest.mark.parametrize("plan", everything())
def test_everything_composed(plan: str, model: str) -> None:
    prove(model, plan)
