"""update=backward and last-backward on ranks: equal to one device, whatever the axis, schedule, optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.verify import Case, assert_equal
from tests.cases import sgd
from tests.contract_models import CASES, Twice, class_loss, vectors
from tests.parallel.data.test_update_in_backward import WIDE, Layers, detached

pytestmark = pytest.mark.usefixtures("warm_contract")

Warm = Callable[[int], Ranks]
_LAST = "update=last-backward"


def torch_adafactor(parameters: Any) -> torch.optim.Optimizer:
    """Needs whole parameters, each on one rank."""
    return torch.optim.Adafactor(parameters, lr=1e-2)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return echelon.optim.Adafactor(parameters, lr=1e-2)


def case(model: str, **changes: Any) -> Case:
    """Short, without clip, each module a unit."""
    return dataclasses.replace(
        CASES[model], **({"clip": None, "steps": 4, "options": {"smallest_unit": 0}} | changes)
    )


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(
    "gpt-data=2 zero=3 microbatches=2 update=last-backward", "llama-tensor=2 sequence=true update=backward"
)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("twice", "data=2 update=backward"),
        ("gpt", f"data=2 zero=3 microbatches=2 {_LAST}"),
        ("gpt", f"pipeline=2 schedule=zero-bubble microbatches=4 {_LAST}"),
        ("llama", "tensor=2 sequence=true update=backward"),
    ],
)
def test_a_plan_is_equal_to_one_device(model: str, plan: str) -> None:
    assert_equal(case(model), plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *(
            (model, f"data=2 zero={zero} update=backward")
            for zero in range(4)
            for model in ("twice", "encoder")
        ),
        *(("gpt", f"data=2 zero={zero} microbatches=3 {_LAST}") for zero in range(4)),
        *(
            ("gpt", f"pipeline=2 schedule={schedule} microbatches=4 {_LAST}")
            for schedule in ("naive", "gpipe", "1f1b", "interleaved chunks=2", "zero-bubble")
        ),
        ("gpt", "pipeline=2 update=backward"),
        ("llama", f"tensor=2 zero=0 microbatches=2 {_LAST}"),
        ("llama", "data=2 tensor=2 zero=2 update=backward"),
        ("llama", f"context=2 microbatches=2 {_LAST}"),
        ("llama", f"data=2 pipeline=2 zero=2 microbatches=3 {_LAST}"),
        # Replicas of a stage that take microbatches in turn.
        ("gpt", f"pipeline=2-1 microbatches=4 {_LAST}"),
        ("gpt", f"pipeline=1-2 schedule=naive microbatches=4 {_LAST}"),
        ("llama", f"pipeline=1-2 zero=1 schedule=naive microbatches=4 {_LAST}"),
        ("llama", f"pipeline=2-1 zero=2 microbatches=4 {_LAST}"),
        # Hybrid sharding.
        ("gpt", "data=4 zero=2 shard=2 update=backward"),
        ("gpt", "data=4 zero=3 shard=2 update=backward"),
        # What is recomputed in the backward pass needs weights as they were.
        ("gpt", "data=2 zero=3 recompute=full update=backward"),
        ("gpt", f"data=2 recompute=sqrt microbatches=2 {_LAST}"),
        ("gpt", f"data=2 zero=2 contiguous=true microbatches=2 {_LAST}"),
    ],
)
def test_every_axis_and_schedule(model: str, plan: str) -> None:
    assert_equal(case(model), plan)


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        pytest.param(sgd, "data=2 zero=1 update=backward", marks=pytest.mark.slow),
        (adafactor, "data=2 zero=2 update=backward"),
        pytest.param(adafactor, "data=2 update=backward", marks=pytest.mark.slow),
        pytest.param(adafactor, f"data=2 zero=3 microbatches=2 {_LAST}", marks=pytest.mark.slow),
        pytest.param(adafactor, f"pipeline=2 microbatches=2 {_LAST}", marks=pytest.mark.slow),
        pytest.param(adafactor, "tensor=2 update=backward", marks=pytest.mark.slow),
        pytest.param(torch_adafactor, "data=2 zero=1 update=backward", marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_optimizer(make: Any, plan: str) -> None:
    assert_equal(case("llama", make_optimizer=make), plan)


def peak(plan: str) -> int:
    torch.manual_seed(0)
    engine = echelon.parallelize(Layers(), plan, optimizer=sgd, loss=class_loss)
    for step in range(2):
        engine.step(engine.local(vectors(step)))
    return engine.memory().peak["gradients"]


def test_two_units_have_gradients_at_a_time(warm_ranks: Warm) -> None:
    """The largest two neighbours: one on its way. Parts of sums are half of that."""
    two = 4 * (2 * WIDE * (WIDE + 1) + WIDE * (2 * WIDE + 1))
    for zero in (0, 2):
        for bytes_of_rank in warm_ranks(2).run(peak, f"data=2 zero={zero} update=backward"):
            assert two * 0.9 < bytes_of_rank <= (two if zero == 0 else 1.5 * two), zero


def test_unused_and_shared_layers() -> None:
    assert_equal(Case(Twice, vectors, class_loss, sgd, steps=4, clip=None), "update=backward")


def refused(plan: str) -> tuple[str, bool]:
    """What a first step says, and whether its weights are those of before."""
    torch.manual_seed(0)
    engine = echelon.parallelize(
        detached(), plan, optimizer=sgd, loss=class_loss, smallest_unit=0, audit="off"
    )
    before = engine.full_state_dict()
    with pytest.raises(UserError) as error:
        engine.step(engine.local(vectors(0)))
    after = engine.full_state_dict()
    return str(error.value), all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_second_run_that_reads_an_updated_weight_is_refused(warm_ranks: Warm, zero: int) -> None:
    """With zero=1 a part of it was updated by then. With zero=3 it is gathered once and stays."""
    for text, is_unchanged in warm_ranks(2).run(
        refused, f"data=2 zero={zero} recompute=full update=backward"
    ):
        assert "layer 1 (Detached) returned something else" in text
        assert is_unchanged
