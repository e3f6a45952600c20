"""Every error of a job at once, and none that another one causes."""

import math

import pytest

from echelon.errors import UserError
from echelon.train.jobs.job import DataJob, Job, ModelJob, OptimizerJob
from echelon.train.jobs.job_rules import check, job_errors


def errors_of(job: Job) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        check(job)
    return caught.value.errors


def test_all_errors_come_at_once() -> None:
    job = Job(
        plan="data=0",
        steps=0,
        batch=4,
        name="a/b",
        model=ModelJob(preset="gpt-tny"),
        optimizer=OptimizerJob(name="adam", learning_rate=-1, clip=0, betas=(0.9, 1.0), schedule="cosin"),
    )
    errors = errors_of(job)
    starts = [
        "steps=0",
        "name='a/b'",
        "optimizer.name=adam",
        "optimizer.learning_rate=-1",
        "optimizer.clip=0",
        "optimizer.betas",
        "plan: data=0",
        "model: ",
        "optimizer.schedule: ",
    ]
    assert all(any(error.startswith(start) for error in errors) for start in starts), errors
    assert any("gpt-tiny" in error for error in errors), "near-miss of the preset"
    assert any("did you mean 'cosine'" in error for error in errors)


def test_values_that_do_not_fit_together() -> None:
    assert "set batch=8" in errors_of(Job(plan="data=8", batch=4))[0]
    assert "set model.sequence=4096 too" in errors_of(Job(sequence=4096))[0]


def test_averages_and_layers_are_checked_as_by_parallelize() -> None:
    errors = errors_of(Job(average=1.0, layers="blocs"))
    assert [error.split(":")[0] for error in errors] == ["average=1.0", "layers='blocs'"]
    (error,) = errors_of(Job(plan="data=2 sync=async", average=0.9))
    assert "drop average, or use sync=all-reduce" in error
    (error,) = errors_of(Job(plan="context=2", layers="blocks"))
    assert error.startswith("plan 'context=2'")


def test_each_error_is_reported_once() -> None:
    # steps=0 came a second time from the schedule, and nothing of the data came at all.
    data = DataJob(source="nowhere", validation_fraction=3)
    assert [error.split(":")[0] for error in errors_of(Job(steps=0, data=data))] == [
        "steps=0",
        "data.validation_fraction=3",
        "data.source=nowhere",
    ]
    (error,) = errors_of(Job(batch=0))
    assert error.startswith("batch=0")


def test_a_schedule_is_checked_without_the_steps_too() -> None:
    errors = errors_of(Job(steps=0, optimizer=OptimizerJob(warmup=-1, schedule="cosin")))
    assert len(errors) == 3
    (error,) = errors_of(Job(steps=10, optimizer=OptimizerJob(schedule="wsd", decay=10)))
    assert "warmup=1 and decay=10: more steps than total=10" in error


def test_an_invalid_model_does_not_hide_the_data() -> None:
    errors = errors_of(Job(model=ModelJob(heads=3), data=DataJob(source="nowhere", dtype="int")))
    assert [error.split(":")[0] for error in errors] == [
        "model",
        "data.source=nowhere",
        "data.source=nowhere",
    ]


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (Job(name="a\0b"), "name='a"),
        (Job(name=""), "name='': must not be empty"),
        (Job(name=".."), "name='..': must not begin with a dot"),
        (Job(name=".a"), "name='.a': must not begin with a dot"),
        (Job(name="a/b"), "name='a/b': must not contain '/'; use out= for the parent folder"),
        (Job(out="a\0b"), "no NUL character"),
        (Job(out="a\udcff"), "nor bytes that are not text"),
        (Job(seed=2**63), "must be below 2**63"),
        (Job(steps=10**400), "must be below 2**63"),
        (Job(optimizer=OptimizerJob(momentum=-0.1)), "optimizer.momentum=-0.1"),
        (Job(optimizer=OptimizerJob(name="sm3", momentum=1.0)), "must be below 1 for sm3"),
        (Job(optimizer=OptimizerJob(weight_decay=-0.1)), "optimizer.weight_decay=-0.1"),
        (Job(optimizer=OptimizerJob(weight_decay=math.nan)), "optimizer.weight_decay=nan"),
        (Job(optimizer=OptimizerJob(learning_rate=math.inf)), "optimizer.learning_rate=inf"),
        (Job(optimizer=OptimizerJob(learning_rate=math.nan)), "optimizer.learning_rate=nan"),
        (Job(data=DataJob(validation_fraction=math.nan)), "data.validation_fraction=nan"),
        (Job(model=ModelJob(weights="a\0b")), "model: a"),
        (Job(data=DataJob(source="a\0b")), "there is no file or folder"),
    ],
)
def test_values_that_ended_in_a_traceback_or_in_a_strange_folder(job: Job, says: str) -> None:
    (error,) = errors_of(job)
    assert says in error


def test_a_plan_that_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    (error,) = errors_of(Job(plan="data=99999 expert=9", batch=99999, sequence=1))
    assert error.startswith("plan 'data=99999 expert=9': needs")
    assert "with torchrun" in error
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "99999")
    check(Job(plan="data=99999", batch=99999, sequence=1, data=DataJob(validation_fraction=0)))


@pytest.mark.parametrize(
    ("job", "unread"),
    [
        (Job(plan="data=64"), "batch"),
        (Job(sequence=4096), "model.sequence"),
        (Job(sequence=4096), "model"),
        (Job(optimizer=OptimizerJob(warmup=10_000)), "steps"),
        (Job(optimizer=OptimizerJob(decay=3)), "optimizer.schedule"),
        (Job(model=ModelJob(width=130)), "model.heads"),
    ],
)
def test_a_rule_is_not_checked_where_a_value_was_not_read(job: Job, unread: str) -> None:
    assert len(job_errors(job)) == 1
    assert job_errors(job, unread=[unread]) == []


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


@pytest.mark.parametrize("text", ["9", "9:9", "0:3", "7:8", "a:b", "1:2:3", ""])
def test_the_steps_of_a_trace_are_steps_of_the_job(text: str) -> None:
    (error,) = job_errors(Job(trace=text, steps=6))
    assert error == (
        f"trace={text!r}: must be the first step and the one after the last, of steps 1 to 6, "
        "like trace=10:13"
    )
    assert Job(trace="2:9", steps=6).trace_steps == range(2, 9)
    assert not job_errors(Job(trace="6:7", steps=6))


def test_trackers_of_a_job_are_known_and_installed() -> None:
    assert job_errors(Job(track=())) == job_errors(Job(track=("jsonl",))) == []
    errors = job_errors(Job(track=("jsonl", "tensorbord", "jsonl")))
    assert errors == [
        "track: 'tensorbord' is not a tracker (did you mean 'tensorboard'?)",
        "track: jsonl, tensorbord, jsonl: each tracker once",
    ]
