"""Any set of offloads together is equal to one device, whatever the rest of the plan."""

import dataclasses
from itertools import combinations
from typing import Any

import pytest

from echelon.plan import FIELDS
from echelon.verify import Case, assert_equal
from tests.contract_models import CASES

pytestmark = pytest.mark.usefixtures("warm_contract")

OFFLOADS = FIELDS["offload"].options
SETS = [",".join(chosen) for count in (1, 2, 3) for chosen in combinations(OFFLOADS, count)]
ALL = ",".join(OFFLOADS)
SOME_BYTES = 32_000  # hold some of the model's units, and not others
PLANS = [
    "data=1",
    *(f"data=2 zero={zero}" for zero in range(4)),
    "pipeline=2 microbatches=2 schedule=1f1b",
    "tensor=2",
    "recompute=full",
    "data=2 zero=3 recompute=full",
    "data=2 zero=2 update=backward",
    "data=2 zero=3 update=backward recompute=full",
    "pipeline=2 microbatches=4 schedule=1f1b update=last-backward",
    "data=4 zero=3 shard=2",
]


def case(plan: str, **changes: Any) -> Case:
    given: dict[str, Any] = {"steps": 4, "options": {"smallest_unit": 0}}
    if "backward" in plan:
        given["clip"] = None
    return dataclasses.replace(CASES["gpt"], **(given | changes))


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("data=2 zero=1")
@pytest.mark.parametrize("plan", ["data=1", "data=2 zero=1", "data=2 zero=3 update=backward recompute=full"])
def test_all_offloads_are_equal_to_one_device(plan: str) -> None:
    assert_equal(case(plan), f"{plan} offload={ALL}")


def resident(plan: str, num_bytes: int) -> Case:
    return case(plan, options={"smallest_unit": 0, "resident_bytes": num_bytes})


def test_resident_weights_are_equal_to_one_device() -> None:
    """Some units stay on the device; the host sends their new weights, and nobody gathers them."""
    assert_equal(resident("data=1", SOME_BYTES), "offload=optimizer,parameters")


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [SOME_BYTES, 10**9])
@pytest.mark.parametrize("offloads", ["parameters", "optimizer,parameters"])
@pytest.mark.parametrize("plan", PLANS)
def test_resident_weights_are_equal_to_one_device_in_every_plan(
    plan: str, offloads: str, num_bytes: int
) -> None:
    assert_equal(resident(plan, num_bytes), f"{plan} offload={offloads}")


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("offloads", SETS)
def test_every_set_is_equal_to_one_device(offloads: str, plan: str) -> None:
    assert_equal(case(plan), f"{plan} offload={offloads}")


@pytest.mark.slow
@pytest.mark.parametrize("plan", [plan for plan in PLANS if "backward" not in plan])
@pytest.mark.parametrize("offloads", [each for each in SETS if "optimizer" in each])
def test_every_set_is_equal_to_one_device_one_step_late(offloads: str, plan: str) -> None:
    assert_equal(case(plan), f"{plan} offload={offloads} delay=1")
