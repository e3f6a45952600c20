"""Which jobs can skip steps that are not finite, and go back after a spike."""

import pytest

from echelon.train.jobs.job import Job
from echelon.train.jobs.job_rules import job_errors


def number_errors(**settings: object) -> list[str]:
    names = ("nonfinite", "most_skipped", "spike", "max_rollbacks")
    errors = job_errors(Job(**settings))  # type: ignore[arg-type]
    return [error for error in errors if error.startswith(names)]


def test_all_errors_at_once() -> None:
    assert number_errors(
        nonfinite="allow", most_skipped=0, spike_factor=1.0, spike_window=0, max_rollbacks=-1
    ) == [
        "most_skipped=0: must be at least 1",
        "spike_window=0: must be at least 1",
        "max_rollbacks=-1: must be at least 0",
        "nonfinite='allow': must be one of skip, stop",
        "spike_factor=1.0: must be a number above 1, or 0 for none",
    ]


@pytest.mark.parametrize("factor", [-1.0, 0.5, 1.0, float("inf"), float("nan")])
def test_factors_that_are_none(factor: float) -> None:
    (error,) = number_errors(spike_factor=factor)
    assert error.startswith(f"spike_factor={factor}: must be a number above 1")


def test_a_rollback_needs_checkpoints_and_losses_in_common() -> None:
    assert number_errors(spike_factor=2.0) == []
    assert "set save_every=100" in number_errors(spike_factor=2.0, save_every=0)[0]
    assert "workers see losses of their own" in number_errors(spike_factor=2.0, plan="data=2 sync=async")[0]


@pytest.mark.parametrize(
    "plan", ["update=backward", "pipeline=2 schedule=pipedream microbatches=2", "data=2 sync=async"]
)
def test_plans_that_cannot_skip_stop_unless_they_are_told_to_skip(plan: str) -> None:
    assert Job(plan=plan).engine_nonfinite == "allow"
    assert Job(plan=plan, nonfinite="stop").engine_nonfinite == "allow"
    assert number_errors(plan=plan) == number_errors(plan=plan, nonfinite="stop") == []
    (error,) = number_errors(plan=plan, nonfinite="skip")
    assert error.endswith(", or nonfinite=stop")


def test_others_skip_unless_they_are_told_to_stop() -> None:
    assert Job().engine_nonfinite == "skip"
    assert Job(nonfinite="stop", plan="pipeline=auto data=2").engine_nonfinite == "stop"
