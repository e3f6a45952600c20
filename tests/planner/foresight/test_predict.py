"""A step of a plan: its parts, and how words of the plan change them."""

import time
from dataclasses import replace

import pytest

from echelon.errors import UserError
from echelon.plan import Plan
from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.practice import MEGATRON_TESTS, with_slow_samples
from echelon.planner.foresight.predict import forecast_of, predict
from echelon.planner.foresight.prediction import Prediction
from echelon.planner.foresight.settings import settings_of
from echelon.planner.shape.presets import preset_shape

SHAPE = preset_shape("llama3-8b")
CLUSTER = read_cluster("h100:64")


def step(words: str, batch: int = 128) -> Prediction:
    return predict(SHAPE, f"precision=bf16 {words}", CLUSTER, batch, 4096)


def test_the_parts_add_up_to_the_step() -> None:
    prediction = step("data=8 tensor=2 pipeline=4 zero=1 microbatches=8 schedule=1f1b recompute=full")
    parts = prediction.seconds._asdict()
    hidden = parts.pop("hidden")
    assert prediction.step_seconds == pytest.approx(sum(parts.values()))
    assert hidden > 0
    assert all(value >= 0 for value in parts.values())
    assert 0 < prediction.mfu < prediction.hfu < 0.8
    assert prediction.tokens_per_second == pytest.approx(128 * 4096 / prediction.step_seconds)


def test_more_microbatches_have_less_bubble() -> None:
    few, many = (step(f"data=16 pipeline=4 microbatches={m} schedule=1f1b") for m in (2, 8))
    assert few.bubble > many.bubble > 0
    chunks = step("data=16 pipeline=4 microbatches=8 schedule=interleaved chunks=2")
    assert chunks.seconds.bubble == pytest.approx(many.seconds.bubble / 2, rel=0.3)
    zero = step("data=16 pipeline=4 microbatches=8 schedule=zero-bubble")
    assert zero.seconds.bubble < many.seconds.bubble


def test_words_that_take_time() -> None:
    plain = step("data=64 microbatches=2 zero=1").step_seconds
    assert step("data=64 microbatches=2 zero=1 recompute=full").step_seconds > 1.2 * plain
    assert step("data=64 microbatches=2 offload=optimizer").step_seconds > plain
    assert step("data=64 microbatches=2 offload=optimizer delay=1").seconds.offload == 0
    assert step("data=64 microbatches=2 sync=parameter-server").seconds.data > 5 * plain
    assert step("data=64 microbatches=2 sync=async").seconds.data == 0
    assert step("data=64 microbatches=2 gradients=same zero=1").seconds.data < plain


def test_a_step_takes_at_least_as_long_as_its_loader_reads() -> None:
    settings = settings_of(Plan.parse("data=64 microbatches=2 precision=bf16"))
    plain, slow = (
        forecast_of(SHAPE, CLUSTER, practice).predict(settings, 128)
        for practice in (MEGATRON_TESTS, with_slow_samples(MEGATRON_TESTS))
    )
    assert slow.step_seconds == plain.step_seconds  # of a large model, which takes longer
    small = preset_shape("gpt-small")
    read = with_slow_samples(MEGATRON_TESTS)
    waiting = forecast_of(small, CLUSTER, read).predict(settings, 128)
    assert waiting.step_seconds == pytest.approx(3 * read.read_microbatch, rel=0.02)


def test_the_largest_model_that_an_h200_trains_fits_with_its_optimizer() -> None:
    """benchmarks/results/largest-model.json: 7.94 s a step, 139.0e9 bytes at the peak."""
    shape = replace(SHAPE, layers=71, hidden=8192, heads=64, ffn=28672, vocab=256, sequence=1024)
    words = "precision=bf16 recompute=full update=backward masters=false"
    found = predict(shape, words, read_cluster("h200:1"), 8, optimizer="adafactor")
    assert found.step_seconds == pytest.approx(7.94, rel=0.1)
    assert found.peak == pytest.approx(139.0e9, rel=0.02)
    assert found.fits
    assert not predict(shape, words, read_cluster("h200:1"), 8).fits


def test_more_devices_take_less_time_per_step() -> None:
    assert step("data=64 zero=1", 64).step_seconds < step("data=32 microbatches=2 zero=1", 64).step_seconds


def test_losses_of_gates_take_a_forward_pass_where_backwards_begin_before() -> None:
    shape, cluster = preset_shape("mixtral-8x7b"), read_cluster("h200:64")
    assert shape.experts is not None
    assert shape.experts.has_loss
    free = replace(shape, experts=replace(shape.experts, has_loss=False))
    for words, takes_one in (
        ("data=64 zero=3", False),
        ("data=64 zero=3 microbatches=2", True),
        ("data=16 pipeline=4 zero=1 microbatches=8 schedule=gpipe", False),
        ("data=16 pipeline=4 zero=1 microbatches=8 schedule=1f1b", True),
    ):
        one, other = (
            predict(each, f"precision=bf16 {words}", cluster, 128, 4096).seconds for each in (shape, free)
        )
        assert other.recompute == 0
        assert (one.recompute > 0.25 * one.compute) == (one.step > 1.2 * other.step) == takes_one


def test_errors_of_plan_and_batch_are_listed() -> None:
    with pytest.raises(UserError) as refusal:
        predict(SHAPE, "data=3 tensor=3", CLUSTER, 7)
    assert len(refusal.value.errors) == 3


def test_a_cluster_with_a_price_has_costs() -> None:
    priced = predict(SHAPE, "data=8 zero=3 precision=bf16", replace(CLUSTER, count=8, price=3.6), 8, 4096)
    assert priced.cost == pytest.approx(3.6 * 8 * priced.step_seconds / 3600)


def test_predictions_are_many_per_second() -> None:
    """10,000 a second: measured as work of this process, and with room for a slow machine."""
    forecast = forecast_of(SHAPE, CLUSTER)
    settings = [
        settings_of(Plan.parse(f"data=4 pipeline=16 schedule=1f1b microbatches={m} zero={z} precision=bf16"))
        for m in (16, 32, 64)
        for z in (0, 1, 2, 3)
    ]
    for each in settings:
        forecast.predict(each, 256)
    start = time.process_time()
    for _ in range(100):
        for each in settings:
            forecast.predict(each, 256)
    assert time.process_time() - start < 1200 / 3000
