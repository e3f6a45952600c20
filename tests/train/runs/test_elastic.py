"""Fewer ranks than the plan has: the data degree shrinks, the global batch stays."""

import dataclasses
from pathlib import Path

import pytest

from echelon.plan import Plan
from echelon.train.events import Event, Noted, Stepped
from echelon.train.jobs.job import Job
from echelon.train.runs import elastic
from echelon.train.runs.elastic import change, fit_job, plans_for
from echelon.train.trainer import train
from tests.train.test_trainer import small_job


def first(text: str, ranks: int, *, exactly: bool = False) -> str | None:
    return next((str(plan) for plan in plans_for(Plan.parse(text), ranks, exactly=exactly)), None)


@pytest.mark.parametrize(
    ("plan", "ranks", "smaller"),
    [
        ("data=4 zero=3", 4, "data=4 zero=3"),
        ("data=4 zero=3", 3, "data=3 zero=3"),
        ("data=4 pipeline=2 microbatches=4", 7, "data=3 pipeline=2 microbatches=4"),
        ("data=4 shard=2 zero=3", 3, "data=2 shard=2 zero=3"),
        ("data=4 tensor=2", 1, None),
    ],
)
def test_the_largest_data_degree_that_fits(plan: str, ranks: int, smaller: str | None) -> None:
    assert first(plan, ranks) == (None if smaller is None else str(Plan.parse(smaller)))


def test_under_torchrun_every_rank_must_have_its_place() -> None:
    assert first("data=4 pipeline=2", 6, exactly=True) == "data=3 pipeline=2"
    assert first("data=4 pipeline=2", 7, exactly=True) is None


def test_a_job_is_fitted_by_all_of_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "ranks_available", lambda: 3)
    job = Job(plan="data=4 zero=1")
    fitted = fit_job(job)
    assert (fitted.plan, fitted.batch) == ("data=3 zero=1", job.batch)
    assert change(job, fitted) == (
        "elastic: 3 devices for the plan 'data=4 zero=1'; training with 'data=3 zero=1', and the same global "
        "batch of 32"
    )
    assert fit_job(Job(plan="data=2")) == Job(plan="data=2")
    wrong = dataclasses.replace(job, steps=0)
    assert fit_job(wrong) == wrong, "what is wrong for another reason is refused as it is"


def test_a_training_with_fewer_devices_says_so_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[Event] = []
    train(small_job(tmp_path, plan="data=2", steps=2), whole.append)
    monkeypatch.setattr(elastic, "ranks_available", lambda: 1)
    shrunk: list[Event] = []
    train(small_job(tmp_path, plan="data=2", steps=2), shrunk.append, elastic=True)
    (note,) = [event for event in shrunk if isinstance(event, Noted)]
    assert "training with 'data=1'" in note.text
    losses = [[event.loss for event in events if isinstance(event, Stepped)] for events in (whole, shrunk)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
