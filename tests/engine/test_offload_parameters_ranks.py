"""offload=parameters on ranks: equal to one device, whatever the axis, schedule, precision and optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import echelon
from echelon.launching import Ranks
from echelon.verify import Case, assert_equal
from tests.contract_models import CASES
from tests.engine.test_offload_parameters import UNIT, Layers, batch
from tests.parallel.data.test_update_in_backward_ranks import adafactor, torch_adafactor

pytestmark = pytest.mark.usefixtures("warm_contract")

Warm = Callable[[int], Ranks]
_OFFLOAD = "offload=parameters"


def case(model: str, plan: str, **changes: Any) -> Case:
    """Short, each module a unit."""
    given: dict[str, Any] = {"steps": 4, "options": {"smallest_unit": 0}}
    if "backward" in plan:
        given["clip"] = None
    return dataclasses.replace(CASES[model], **(given | changes))


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("gpt-pipeline=2 microbatches=2 update=last-backward")
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("twice", "data=1"),
        ("gpt", "data=2 zero=3"),
        ("gpt", "pipeline=2 microbatches=2 update=last-backward"),
    ],
)
def test_a_plan_is_equal_to_one_device(model: str, plan: str) -> None:
    assert_equal(case(model, plan), f"{plan} {_OFFLOAD}")


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *(("gpt", f"data=2 zero={zero} microbatches=2") for zero in range(4)),
        *(("twice", f"data=2 zero={zero} update=backward") for zero in range(4)),
        ("encoder", "data=2 zero=1"),
        ("lstm", "data=2"),
        ("resnet", "data=2 zero=2"),
        ("llama", "data=4 zero=3 shard=2 recompute=full"),
        ("gpt", "data=4 zero=1 shard=2 update=backward"),
        ("gpt", "data=2 zero=3 recompute=selective update=backward"),
        ("llama", "tensor=2"),
        ("llama", "tensor=2 sequence=true update=backward"),
        ("llama", "context=2 zero=3"),
        ("gpt", "recompute=full"),
        ("gpt", "recompute=sqrt update=backward"),
        ("gpt", "pipeline=2 microbatches=2 recompute=full"),
        ("gpt", "pipeline=2 schedule=gpipe microbatches=2 data=2 zero=1"),
        ("gpt", "pipeline=2 schedule=interleaved chunks=2 microbatches=2 data=2 zero=3"),
        ("gpt", "pipeline=2-1 microbatches=2"),
    ],
)
def test_many_plans_are_equal_to_one_device(model: str, plan: str, prefetch: int) -> None:
    options = {"smallest_unit": 0, "prefetch": prefetch}
    assert_equal(case(model, plan, options=options), f"{plan} {_OFFLOAD}")


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [adafactor, torch_adafactor])
@pytest.mark.parametrize("plan", ["data=1", "data=2 zero=1", "data=2 zero=3 update=backward", "tensor=2"])
def test_optimizers_that_need_more_than_elements(plan: str, make_optimizer: Any) -> None:
    assert_equal(case("llama", plan, make_optimizer=make_optimizer), f"{plan} {_OFFLOAD}")


@pytest.mark.slow
@pytest.mark.parametrize("resident_bytes", [1, 20_000])
@pytest.mark.parametrize("plan", ["data=1", "data=2", "data=2 zero=2", "data=2 zero=3 update=backward"])
def test_a_part_of_the_weights_may_stay(plan: str, resident_bytes: int) -> None:
    options = {"smallest_unit": 0, "resident_bytes": resident_bytes}
    assert_equal(case("gpt", plan, options=options), f"{plan} {_OFFLOAD}")


def losses(plan: str) -> tuple[list[float], int, dict[str, Tensor]]:
    model = echelon.deferred(Layers)
    engine = echelon.parallelize(
        model, plan, optimizer=torch.optim.AdamW, loss=torch.nn.functional.mse_loss, seed=1
    )
    found = [engine.step(engine.local(batch(step))).loss for step in range(4)]
    held = sum(tensor.nbytes for tensor in engine.mesh.boundary.storages().get("parameters", []))
    weights = engine.full_state_dict()
    engine.close(restore=False)
    return found, held, weights


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16 masters=false", "fp16", "fp32"])
@pytest.mark.parametrize(("plan", "parts"), [("data=2", 1), ("data=2 zero=1", 1), ("data=2 zero=3", 2)])
def test_a_deferred_model_trains_as_without_offload(
    plan: str, parts: int, precision: str, warm_ranks: Warm
) -> None:
    plan = f"{plan} precision={precision}"
    without = warm_ranks(2).run(losses, plan)
    offloaded = warm_ranks(2).run(losses, f"{plan} {_OFFLOAD}")
    size = 4 if precision == "fp32" else 2
    assert [held for _, held, _ in offloaded] == [6 * UNIT * size // 4 // parts] * 2
    for (one, _, weights), (other, _, others) in zip(without, offloaded, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, others[name], rtol=1e-5, atol=1e-7)
