"""Every gate trains as on one device, wherever its experts are."""

import pytest

from echelon.verify import assert_equal
from tests.nn.experts.all_gates import GATES
from tests.nn.experts.cases import case

pytestmark = pytest.mark.usefixtures("warm_contract")

SPREAD = ["data=2", "data=4", "data=2 expert=2", "data=4 expert=2", "data=4 expert=4"]
SCHEDULES = ["1f1b", "interleaved chunks=2", "zero-bubble"]
COMPOSED = [
    *(f"data=2 expert=2 zero={zero}" for zero in range(4)),
    *(f"data=4 expert=2 zero={zero} microbatches=2" for zero in range(4)),
    *(f"pipeline=2 microbatches=4 schedule={schedule}" for schedule in SCHEDULES),
    *(f"data=2 expert=2 pipeline=2 microbatches=4 schedule={schedule}" for schedule in SCHEDULES),
    "tensor=2",
    "data=2 expert=2 tensor=2",
    "tensor=2 sequence=true",
    "data=2 expert=2 recompute=full",
    "data=2 expert=2 zero=3 recompute=full",
    "data=2 expert=2 pipeline=2 microbatches=4 recompute=full",
    "data=2 expert=2 update=backward",
]
ALONG_SEQUENCE = ["context=2", "data=2 expert=2 context=2", "data=2 expert=2 tensor=2 sequence=true"]


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(
    "hierarchical-data=2 expert=2", "noisy-data=2 expert=2 microbatches=2", "softmax-data=2 expert=2 tensor=2"
)
@pytest.mark.parametrize(
    ("gate", "plan"),
    [
        ("noisy", "data=2 expert=2 microbatches=2"),
        ("switch capacity", "data=2 expert=2"),
        ("gshard", "pipeline=2 microbatches=2"),
        ("sigmoid", "data=2 expert=2 zero=3 recompute=full"),
        ("hierarchical", "data=2 expert=2"),
        ("softmax", "data=2 expert=2 tensor=2"),
    ],
)
def test_gates_train_as_on_one_device(gate: str, plan: str) -> None:
    assert_equal(case(gate, plan), plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", SPREAD)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate_trains_as_on_one_device_wherever_experts_are(gate: str, plan: str) -> None:
    assert_equal(case(gate, plan, steps=20), plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", COMPOSED)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate_trains_as_on_one_device_in_every_plan(gate: str, plan: str) -> None:
    assert_equal(case(gate, plan), plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ALONG_SEQUENCE)
@pytest.mark.parametrize("gate", [name for name in GATES if "capacity" not in name and "choice" not in name])
def test_gates_that_look_at_single_tokens_train_as_on_one_device_along_the_sequence(
    gate: str, plan: str
) -> None:
    assert_equal(case(gate, plan), plan)
