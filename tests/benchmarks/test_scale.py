"""The tables of docs/scale.md: what is predicted and counted today is what is recorded."""

import json

import pytest

from benchmarks import scale
from echelon.plan import Plan

ROWS = json.loads((scale.RESULTS / "scale.json").read_text(encoding="utf-8"))["table"]
LIMITS = json.loads((scale.RESULTS / "scale-limits.json").read_text(encoding="utf-8"))["table"]


def test_there_is_a_row_for_each_model_and_size() -> None:
    assert [(row["model"], row["GPUs"]) for row in ROWS] == [
        (model, f"{devices:,}") for model in scale.MODELS for devices in scale.SIZES
    ]


@pytest.mark.parametrize("row", [row for row in ROWS if row["step"]], ids=lambda row: row["GPUs"])
def test_recorded_plans_take_as_long_today(row: dict[str, str]) -> None:
    assert scale.again(row) == row["step"]


def test_a_model_that_does_not_fit_says_what_would() -> None:
    row = scale.forecast("llama3-405b", 8)
    assert row == ROWS[0]
    assert "it fits from 64 devices" in row["plan"]


def test_limits_are_those_of_the_code() -> None:
    assert list(scale.held_rows(ROWS[:3])) == LIMITS[:2]
    assert scale.start_bytes(2048) > 3.9 * scale.start_bytes(1024)
    assert scale.groups_of_rank(Plan.parse("data=8")) == 1
    assert scale.groups_of_rank(Plan.parse("data=2 tensor=2 pipeline=2")) > 3
