"""Steps whose loss or gradients are not finite: left out on all ranks alike, counted, and at last an error
that names the first layer."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from echelon import UserError, parallelize
from echelon.launching import Ranks
from echelon.models import cross_entropy
from echelon.plan import Plan
from echelon.update.nonfinite import MOST_SKIPPED, NonfiniteError
from tests.cases import adamw, mean_loss
from tests.engine.poisoned_training import (
    STEPS,
    Poison,
    expert_tokens,
    full_state,
    layers,
    poisoned_engine,
    seeded,
    train_on_rank,
    train_plain,
    training_of,
    vectors,
)
from tests.engine.test_deferred import deferring
from tests.nn.experts.models import make_model
from tests.reads import no_reads
from tests.update.precision.test_loss_scaling_training import marked_engine, state, train

Warm = Callable[[int], Ranks]
INPUT, GRADIENT, LOSS = Poison("input"), Poison("gradient"), Poison("loss")
slow = pytest.mark.slow


def check_left_out(results: list[dict[str, Any]], plan: str, poison: Poison) -> None:
    expected = train_plain(plan, poison)
    left_out = [step in poison.steps for step in range(STEPS)]
    for result in results:
        assert result["skipped"] == left_out
        assert result["counts"] == (STEPS - len(poison.steps), len(poison.steps))
        assert result["state"].keys() >= expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(result["state"][name], value, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("poison", [INPUT, GRADIENT], ids=lambda poison: poison.kind)
def test_a_poisoned_batch_is_left_out_on_one_device(poison: Poison, deferred: bool) -> None:
    check_left_out([train_on_rank("data=1", poison, deferred=deferred)], "data=1", poison)


def test_a_loss_that_is_no_number_in_one_microbatch_is_left_out() -> None:
    """Rows of an embedding that other microbatches use have numbers, and none on one device."""
    check_left_out([train_on_rank("expert=1 microbatches=4", LOSS)], "expert=1", LOSS)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("plan", "poison"),
    [
        ("data=2", INPUT),
        ("data=2 zero=3", GRADIENT),
        ("pipeline=2 microbatches=2", GRADIENT),
        ("tensor=2", INPUT),
        *(
            pytest.param(plan, poison, marks=slow)
            for plan, poison in [
                ("data=2", GRADIENT),
                ("data=2 zero=1", INPUT),
                ("data=2 zero=2 microbatches=2", GRADIENT),
                ("data=2 zero=3", INPUT),
                ("tensor=2", GRADIENT),
                ("pipeline=2 microbatches=4 schedule=zero-bubble", INPUT),
                ("pipeline=2 microbatches=2 schedule=interleaved chunks=2", GRADIENT),
                ("pipeline=2 microbatches=2 recompute=full", INPUT),
                ("data=2 sync=parameter-server", INPUT),
                ("data=2 zero=1 offload=optimizer", GRADIENT),
                ("data=2 zero=3 offload=parameters", INPUT),
                ("data=2 pipeline=2 zero=1 microbatches=2", INPUT),
                ("data=2 tensor=2 zero=3", GRADIENT),
                ("pipeline=3-1 microbatches=3", INPUT),
                ("context=2", LOSS),
                ("data=2 expert=2", LOSS),
                ("data=2 expert=2 zero=1 pipeline=2 microbatches=2", LOSS),
            ]
        ),
    ],
)
def test_a_poisoned_batch_is_left_out_on_all_ranks(warm_ranks: Warm, plan: str, poison: Poison) -> None:
    results = warm_ranks(Plan.parse(plan).ranks).run(train_on_rank, plan, poison)
    check_left_out(results, plan, poison)


@pytest.mark.parametrize("plan", ["data=2 zero=3", pytest.param("pipeline=2 microbatches=2", marks=slow)])
def test_on_ranks_whose_numbers_stay_on_the_device(warm_ranks: Warm, plan: str) -> None:
    results = warm_ranks(2).run(deferred_on_rank, plan, GRADIENT)
    check_left_out(results, plan, GRADIENT)


def deferred_on_rank(plan: str, poison: Poison) -> dict[str, Any]:
    return train_on_rank(plan, poison, deferred=True)


def test_a_step_that_is_left_out_reads_nothing_from_a_device() -> None:
    training = training_of("data=1", INPUT)
    with deferring():
        engine = poisoned_engine("data=1", training, check_every=0, audit="first")
    for step in range(4):
        batch = training.batch(step, INPUT)
        if step < 2:  # the first ones read what later ones need not
            engine.step(batch)
            continue
        with no_reads(), mock.patch.object(engine._step, "check_earlier"):  # of earlier ones
            metrics = engine.step(batch)
        assert metrics.skipped
    assert not engine.step(training.batch(4, INPUT)).skipped


def test_without_the_rule_weights_become_nan() -> None:
    # What the others prove is not the doing of the model.
    result = train_on_rank("data=1", INPUT, nonfinite="allow")
    assert not any(result["skipped"])
    assert all(value.isnan().any() for name, value in result["state"].items() if name.endswith("weight"))


# Buffers.


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()


def test_running_statistics_of_a_step_that_is_left_out_are_undone() -> None:
    with parallelize(normed(), "precision=fp64", optimizer=adamw, loss=mean_loss, nonfinite="skip") as engine:
        engine.step(vectors(0, None))
        before = full_state(engine)
        assert engine.step(vectors(2, INPUT)).skipped
        after = full_state(engine)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not engine.step(vectors(1, None)).skipped
        assert not torch.equal(before["1.running_mean"], full_state(engine)["1.running_mean"])


# fp16.


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_fp16_that_overflows_is_bit_for_bit_what_it_is_without_the_rule(nonfinite: str) -> None:
    results = []
    for options in ({}, {"nonfinite": nonfinite}):
        with marked_engine("precision=fp16", loss_scale="dynamic", **options) as engine:
            metrics = train(engine, 6, [1, 2, 4])
            results.append((state(engine), [(each.skipped, each.loss_scale) for each in metrics]))
    (plain, told), (ruled, also_told) = results
    assert told == also_told
    assert [skipped for skipped, _ in told] == [False, True, True, False, True, False]
    assert plain.keys() == ruled.keys()
    assert all(torch.equal(plain[name], ruled[name]) for name in plain)


def test_fp16_whose_scale_can_still_fall_is_not_counted_to_the_limit() -> None:
    with marked_engine("precision=fp16", loss_scale="dynamic", nonfinite="skip", most_skipped=2) as engine:
        train(engine, 6, range(6))
        assert engine.skipped_steps == 6
    constant = marked_engine("precision=fp16", loss_scale=1024.0, nonfinite="skip", most_skipped=2)
    with pytest.raises(NonfiniteError, match="in 2 steps in a row"):
        train(constant, 6, range(6))
    constant.close()


# The count of a loss.


def weighted_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Divided by the sum of the outputs' first column: a count that may be NaN too."""
    total = nn.functional.cross_entropy(output, targets, reduction="sum")
    return total, output.detach()[:, 0].abs().sum()


def test_a_count_that_is_not_finite_is_forgotten() -> None:
    # Losses are divided by the count of the step before: one NaN would have made all later ones so.
    training = training_of("microbatches=2", INPUT)._replace(loss=weighted_loss)
    with poisoned_engine("microbatches=2", training, audit="off") as engine:
        metrics = [engine.step(training.batch(step, INPUT)) for step in range(STEPS)]
        assert [each.skipped for each in metrics] == [step in INPUT.steps for step in range(STEPS)]
        assert math.isfinite(metrics[-1].loss)


# Gates.


def test_gates_whose_statistics_are_not_finite_leave_a_step_out() -> None:
    # Without the rule it is an error that names the gate.
    model = seeded(make_model)
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    options: Any = {"optimizer": adamw, "loss": cross_entropy, "nonfinite": "skip"}
    with parallelize(model, "precision=fp64", **options) as engine:
        engine.step(expert_tokens(0))
        before = full_state(engine)
        hook = embedding.register_forward_hook(lambda *call: call[-1] * torch.nan)
        metrics = engine.step(expert_tokens(1))
        hook.remove()
        assert metrics.skipped
        assert math.isnan(metrics.loss)
        after = full_state(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not engine.step(expert_tokens(2)).skipped


# The limit.


def steps_until_error(plan: str, poison: Poison, **options: Any) -> tuple[str, int, int]:
    training = training_of(plan, poison)
    engine = poisoned_engine(plan, training, **options)
    for step in range(100):
        try:
            engine.step(engine.local(training.batch(step, poison)))
        except NonfiniteError as error:
            before = full_state(engine)
            engine.step(engine.local(training.batch(0, poison)))  # it can go on
            after = full_state(engine)
            assert any(not torch.equal(before[name], after[name]) for name in before)
            engine.close()
            return str(error), step, error.step
    raise AssertionError("there was no error")


def test_many_in_a_row_are_an_error() -> None:
    poison = Poison("input", (2, 3, 4, 5, 7, *range(9, 50)))
    text, raised, last = steps_until_error("data=1", poison, most_skipped=5)
    assert (raised, last) == (13, 13)
    assert "in 5 steps in a row, of which the last was step 14;" in text, "as metrics.jsonl counts, from 1"
    assert "were not finite in step 14;" in str(NonfiniteError.of(1, 13))
    text, raised, last = steps_until_error("data=1", Poison("input", range(1, 50)))
    assert (raised, last) == (MOST_SKIPPED, MOST_SKIPPED)


def test_stop_is_an_error_at_once_and_changes_nothing() -> None:
    training = training_of("data=1", INPUT)
    with poisoned_engine("data=1", training, nonfinite="stop") as engine:
        for step in range(2):
            engine.step(training.batch(step, INPUT))
        before = full_state(engine)
        with pytest.raises(NonfiniteError, match="in step 3"):
            engine.step(training.batch(2, INPUT))
        after = full_state(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)


# The first layer.


# What is refused.


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("update=backward", "before it is known whether all gradients of the step are finite"),
        ("schedule=pipedream microbatches=2", "stages update at times of their own"),
        ("sync=async data=2", "no step of all workers exists"),
    ],
)
def test_plans_without_one_update_per_step_are_refused(plan: str, reason: str, nonfinite: Any) -> None:
    with pytest.raises(UserError, match=f"nonfinite={nonfinite} .*{reason}.*, or nonfinite=allow"):
        parallelize(layers(), plan, optimizer=adamw, loss=mean_loss, nonfinite=nonfinite)


def test_values_that_mean_nothing_are_refused() -> None:
    given: Any = {"nonfinite": "ignore", "most_skipped": 0}
    with pytest.raises(UserError) as caught:
        parallelize(layers(), "data=1", optimizer=adamw, loss=mean_loss, **given)
    assert caught.value.errors == (
        "nonfinite='ignore': must be one of allow, skip, stop",
        "most_skipped=0: must be a number of steps, at least 1",
    )
