"""Trainings that end by time: as many steps as fit, the same on all ranks, and after a restart."""

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.train import loop
from echelon.train.events import Event, Limited, Stepped
from echelon.train.jobs.job import Job, ModelJob, OptimizerJob, as_plain
from echelon.train.jobs.job_rules import check
from echelon.train.runs import time_limit
from echelon.train.runs.run_folder import RunFolder
from echelon.train.runs.time_limit import TimeLimit, limited_job, with_steps


def clock(first: float, each: float) -> Callable[[], float]:
    """Steps of `each` seconds, but for the first five, which take `first`."""
    times: Iterator[float] = (min(n, 5) * first + max(0, n - 5) * each for n in count())
    return lambda: next(times)


def counted(job: Job, first: float = 1.0, each: float = 0.5) -> list[int | None]:
    limit = TimeLimit(job, clock(first, each))
    return [limit.after(step) for step in range(1, 13)]


def test_the_steps_that_fit_are_counted_once_behind_the_tenth() -> None:
    # 5 × 1 s and 5 × 0.5 s are gone, and 0.9 of the other 52.5 s are 94 steps of 0.5 s.
    assert counted(Job(minutes=1.0)) == [None] * 9 + [10 + 94, None, None]
    assert counted(Job(minutes=1.0, steps=50))[9] == 50
    assert counted(Job()) == [None] * 12


def test_time_that_is_over_ends_the_training_with_its_warm_up() -> None:
    assert counted(Job(minutes=0.01))[9] == 20
    assert counted(Job(minutes=0.01, optimizer=OptimizerJob(warmup=0)))[9] == 10
    schedule = OptimizerJob(schedule="wsd", warmup=15, decay=30)
    assert counted(Job(minutes=0.01, optimizer=schedule))[9] == 45


def test_the_rest_of_the_job_stays() -> None:
    job = Job(minutes=1.0, batch=4)
    shorter = with_steps(job, 90)
    assert (shorter.steps, shorter.minutes, shorter.batch, shorter.warmup) == (90, None, 4, 20)


def test_a_restart_knows_the_number(tmp_path: Path) -> None:
    job = Job(minutes=1.0)
    folder = RunFolder(tmp_path)
    folder.mark("running", {"job": as_plain(job)})
    assert limited_job(job, tmp_path) == job
    folder.limit_steps(77, job.warmup)
    assert limited_job(job, tmp_path) == with_steps(job, 77)
    kept = json.loads((tmp_path / "run.json").read_text())["job"]
    expected = json.loads(json.dumps(as_plain(with_steps(job, 77))))
    assert kept == expected, "so --resume goes on with it"


def test_minutes_must_be_a_time() -> None:
    with pytest.raises(UserError, match=r"minutes=0\.0: must be a number above 0"):
        check(Job(minutes=0.0))


def train_and_tell(job: Job, folder: Path) -> list[Event]:
    events: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_limit.TimeLimit, "_count", lambda _, step: step + 3)
        loop.train_rank(job, folder, events.append)
    return [event for event in events if isinstance(event, Stepped | Limited)]


def test_a_training_ends_at_its_last_step_with_the_rate_of_its_end(
    tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    optimizer = OptimizerJob(warmup=2, learning_rate=1e-3)
    job = Job(
        steps=500,
        minutes=1.0,
        batch=4,
        sequence=16,
        evaluate_every=0,
        evaluate_batches=1,
        save_every=0,
        model=ModelJob(layers=1, width=32, heads=2),
        optimizer=optimizer,
    )
    (tmp_path / "run.json").write_text(json.dumps({"state": "running", "job": as_plain(job)}))
    events, others = warm_ranks(2).run(train_and_tell, job, tmp_path)
    steps = [event for event in events if isinstance(event, Stepped)]
    assert others == []
    assert [event.step for event in steps] == list(range(1, 14))
    (limited,) = (event for event in events if isinstance(event, Limited))
    assert (limited.steps, limited.of, limited.warmup) == (13, 500, 2)
    assert steps[9].learning_rate > 0.99e-3, "of 500 steps"
    assert steps[-1].learning_rate == pytest.approx(1e-4, rel=0.2), "the floor"
