"""Jobs: defaults that hold, and every error at once."""

import dataclasses

import pytest

from echelon.errors import UserError
from echelon.models import build, save_hf
from echelon.train.jobs.job import DataJob, Job, ModelJob, OptimizerJob, as_plain
from echelon.train.jobs.job_rules import check


def errors_of(job: Job) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        check(job)
    return caught.value.errors


def test_the_embedded_default_is_sound() -> None:
    check(Job())
    assert Job().sequence_length == 128
    assert Job().model.config().num_parameters < 2_000_000


def test_model_values_change_the_preset() -> None:
    config = ModelJob(layers=2, width=64, tied=False, dropout=0.1).config()
    assert (config.layers, config.width, config.heads, config.tied) == (2, 64, 4, False)
    assert (config.dropout, ModelJob().config().dropout) == (0.1, 0.0)


def test_weights_bring_their_own_sizes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    save_hf(build(dataclasses.replace(ModelJob().config(), layers=1)), tmp_path / "hf")
    assert ModelJob(weights=str(tmp_path / "hf")).config().layers == 1
    error = errors_of(Job(model=ModelJob(weights=str(tmp_path / "hf"), layers=3)))[0]
    assert "leave it out" in error
    assert errors_of(Job(model=ModelJob(weights=str(tmp_path / "nowhere"))))


def test_plain_values_leave_out_what_is_not_set() -> None:
    plain = as_plain(Job(data=DataJob(source="x.txt")))
    assert plain["data"] == {"source": "x.txt", "validation_fraction": 0.05}
    assert "sequence" not in plain


def test_the_warm_up_is_a_tenth_of_the_steps_and_at_most_100() -> None:
    assert [Job(steps=steps).warmup for steps in (5, 50, 5000)] == [0, 5, 100]
    assert Job(steps=50, optimizer=OptimizerJob(warmup=7)).warmup == 7
    schedule = Job(steps=50, optimizer=OptimizerJob(schedule="wsd", decay=10, floor=0.5)).schedule()
    assert (schedule.total, schedule.warmup, schedule.decay, schedule.floor) == (50, 5, 10, 0.5)
