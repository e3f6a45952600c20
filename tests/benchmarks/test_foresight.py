"""Predicted memory against dry runs: the record holds, and rows of today are those of the record."""

import json
from pathlib import Path

import pytest

from benchmarks import foresight

RECORD = Path(foresight.__file__).parent / "results" / "foresight.json"
ROWS = {row["plan"].strip("`"): row for row in json.loads(RECORD.read_text(encoding="utf-8"))["gaps"]}


def test_the_record_is_of_all_plans_and_within_its_limits() -> None:
    assert list(ROWS) == [*foresight.PLANS, *foresight.OF_EXPERTS]
    assert foresight.is_held(list(ROWS.values()))


def test_limits_are_limits() -> None:
    fine = {"plan": "", "gpt states": 0.0, "gpt peak": 0.0}
    assert foresight.is_held([fine])
    assert not foresight.is_held([fine | {"gpt states": 0.03}])
    assert foresight.is_held([*[fine] * 9, fine | {"gpt peak": -0.5}])
    assert not foresight.is_held([*[fine] * 8, fine | {"gpt peak": -0.5}])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt", "data=8 zero=2"),
        ("llama", "pipeline=4 microbatches=8 schedule=gpipe"),
        ("llama", "data=8 zero=1 offload=optimizer"),
        ("gpt", "context=4 zero=1"),
        ("moe", "data=4 expert=4"),
    ],
)
def test_a_gap_of_today_is_that_of_the_record(model: str, plan: str) -> None:
    states, peak = foresight.gap(foresight.MODELS[model], plan)
    assert states == pytest.approx(ROWS[plan][f"{model} states"], abs=0.005)
    assert peak == pytest.approx(ROWS[plan][f"{model} peak"], abs=0.02)
