"""Errors by source, and what the planner is held to over all published runs."""

from pathlib import Path
from statistics import median

import pytest

from echelon.planner.validate.report import compare, validate
from tests.planner.shared_data import PUBLISHED_RUNS, needs_published_runs
from tests.planner.validate.test_rows import ROW


def test_a_row_that_is_refused_counts() -> None:
    errors = compare([ROW, ROW | {"gpu": "TPU v4"}])["a paper"]
    plain = errors.to_dict()
    assert (plain["rows"], plain["refused"]) == (2, 1)
    assert 0 < plain["mean_error"] == plain["max_error"] == plain["median_error"] < 1
    assert plain["memory_mean_error"] is None
    assert "TPU" in errors.refused[0]


def test_peaks_are_compared_where_they_are_stated() -> None:
    assert compare([ROW | {"peak_mem_GiB": "60"}])["a paper"].to_dict()["memory_mean_error"] > 0


@needs_published_runs
@pytest.mark.parametrize(
    ("source", "mean", "most"),
    [
        ("vTrain MICRO24 ground_truth_multi.csv", 0.08, 0.4),
        ("vTrain MICRO24 ground_truth_single.csv", 0.10, 0.4),
        ("Korthikanti 2022 (2205.05198) Table 5", 0.04, 0.08),
        ("Megatron-LM README H100 weak scaling (mcore r0.8.0)", 0.08, 0.2),
    ],
)
def test_published_step_times(source: str, mean: float, most: float) -> None:
    errors = validated("runs.csv")[source].to_dict()
    assert errors["refused"] == 0
    assert errors["mean_error"] <= mean
    assert errors["max_error"] <= most


@needs_published_runs
def test_all_published_runs_together() -> None:
    errors = sorted(errors_of("runs.csv", "runs2.csv"))
    assert median(errors) <= 0.08
    assert errors[int(0.9 * len(errors))] <= 0.20


@needs_published_runs
def test_steps_that_wait_for_their_host() -> None:
    """Megatron-LM's own tests, most of which wait for their host; repeats of one test differ by 17 % in the
    90th percentile from their own median. The second limit is of all published runs."""
    tests = sorted(errors_of("megatron_golden.csv"))
    assert median(tests) <= 0.13
    assert tests[int(0.9 * len(tests))] <= 0.35
    every = sorted([*tests, *errors_of("runs.csv", "runs2.csv")])
    assert median(every) <= 0.08
    assert every[int(0.9 * len(every))] <= 0.20


def errors_of(*names: str) -> list[float]:
    return [error for name in names for source in validated(name).values() for error in source.seconds]


@needs_published_runs
def test_published_peaks() -> None:
    assert validated("runs.csv")["torchtitan 2024-12"].to_dict()["memory_mean_error"] <= 0.10


_KNOWN = {}


def validated(name: str):
    if name not in _KNOWN:
        _KNOWN[name] = validate(Path(PUBLISHED_RUNS / name))
    return _KNOWN[name]
