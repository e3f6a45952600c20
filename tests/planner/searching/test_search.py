"""The search: exact against trying everything, and advice where nothing fits."""

from dataclasses import replace

import pytest

from echelon.errors import UserError
from echelon.plan import Plan
from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.predict import forecast_of, predict
from echelon.planner.searching.request import Request
from echelon.planner.searching.search import search
from echelon.planner.searching.space import layouts, savers, shardings
from echelon.planner.shape.presets import preset_shape


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "devices", "batch"),
    [("gpt-1.3b", "v100:8", 16), ("llama3-8b", "h100:8", 16), ("mixtral-8x7b", "h200:8", 8)],
)
def test_the_best_plan_is_the_best_of_all(model: str, devices: str, batch: int) -> None:
    shape, cluster = replace(preset_shape(model), sequence=2048), read_cluster(devices)
    precision = "fp16" if "v100" in devices else "bf16"
    request = Request(f"precision={precision}")
    forecast = forecast_of(shape, cluster)
    seconds = [
        prediction.step_seconds
        for layout in layouts(shape, cluster, batch, request)
        for sharded in shardings(layout, cluster.per_node, request)
        for variants in savers(sharded, request)
        for settings in variants
        if (prediction := forecast.predict(settings, batch)).fits
    ]
    found = search(shape, cluster, batch, precision=precision, top=3)
    assert found.best[0].prediction.step_seconds == min(seconds)
    assert len(found.best) == 3
    assert [each.prediction.step_seconds for each in found.best] == sorted(
        each.prediction.step_seconds for each in found.best
    )
    assert all(each.prediction.fits for each in found.best)
    assert sum(found.cut.values()) > 0


def test_the_prediction_of_a_plan_is_that_of_its_text() -> None:
    shape, cluster = preset_shape("llama3-8b"), read_cluster("h100:16")
    best = search(shape, cluster, 32, sequence=4096, top=2).best[0]
    again = predict(shape, best.plan, cluster, 32, 4096)
    assert again.step_seconds == pytest.approx(best.prediction.step_seconds)
    assert again.peak == pytest.approx(best.prediction.peak)


def test_a_model_that_does_not_fit_is_told_from_where_it_would() -> None:
    result = search(preset_shape("llama3-70b"), read_cluster("v100:2"), 2, sequence=2048, precision="fp16")
    assert result.best == ()
    assert "does not fit: the smallest plan needs" in result.advice
    assert "it fits from" in result.advice
    plain = result.to_dict()
    assert plain["plans"] == []
    assert plain["advice"] == result.advice


def test_a_batch_that_divides_nothing_is_told() -> None:
    assert "evenly" in search(preset_shape("gpt-tiny"), read_cluster("h100:7"), 3).advice
    with pytest.raises(UserError, match="batch=0"):
        search(preset_shape("gpt-tiny"), read_cluster("h100:1"), 0)


def test_a_request_is_searched_as_well() -> None:
    shape, cluster = preset_shape("llama3-8b"), read_cluster("h100:8")
    found = search(
        shape, cluster, 16, sequence=4096, request=Request("tensor=2 zero=1 precision=bf16"), top=5
    )
    plans = [Plan.parse(each.plan) for each in found.best]
    assert [(plan.tensor, plan.zero) for plan in plans] == [(2, 1)] * 5
