"""Ranks that are asked to stop agree on a step, whoever was asked and wherever each of them is."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.train import loop
from echelon.train.events import Event, Limited, Stepped
from echelon.train.jobs.job import Job, ModelJob, OptimizerJob, as_plain
from echelon.train.jobs.job_rules import check
from echelon.train.runs import stopping
from echelon.train.runs.run_folder import RunFolder
from echelon.train.runs.stopping import StopRequest, TimeLimit, limited_job, on_sigterm, with_steps


def train_until_stopped(stop: StopRequest, barrier: threading.Barrier, asks_at: int | None) -> int:
    """Steps of ranks that wait for each other in every step; the last one."""
    step = 0
    while stop.may_begin(step + 1):
        step += 1
        barrier.wait(20)
        if step == asks_at:
            stop.ask()
    return step


@pytest.mark.parametrize("asked", [0, 2])
def test_all_ranks_stop_after_the_same_step(asked: int, tmp_path: Path) -> None:
    ranks, lasts, barrier = 3, {}, threading.Barrier(3)

    def rank(number: int) -> None:
        store = FileStore(str(tmp_path / "store"), ranks)
        with StopRequest(store, number, ranks) as stop:
            lasts[number] = train_until_stopped(stop, barrier, 5 if number == asked else None)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(lasts.values())) == 1, lasts
    assert lasts[0] >= 5


@pytest.mark.parametrize("asks_at", ["before", "after"])
def test_ranks_that_go_back_meanwhile_stop_after_the_same_step(asks_at: str, tmp_path: Path) -> None:
    # A rollback from step 6 to step 3, once: the signal comes when rank 1 has not gone back yet, or has.
    ranks, lasts, barrier = 2, {}, threading.Barrier(2)

    def rank(number: int) -> None:
        store = FileStore(str(tmp_path / "store"), ranks)
        with StopRequest(store, number, ranks) as stop:
            step, has_gone_back = 0, False
            while stop.may_begin(step + 1):
                step += 1
                barrier.wait(20)
                if step == 6 and not has_gone_back:
                    if number == 1 and asks_at == "before":
                        stop.ask()
                        assert stop._agreed.wait(20)
                    step, has_gone_back = 3, True
                    barrier.wait(20)
                    if number == 1 and asks_at == "after":
                        stop.ask()
            lasts[number] = step

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(lasts) == ranks, "none waits for one that has stopped"
    assert lasts[0] == lasts[1]


def test_nobody_asks_and_nobody_stops(tmp_path: Path) -> None:
    with StopRequest(FileStore(str(tmp_path / "store"), 1), 0, 1) as stop:
        assert all(stop.may_begin(step) for step in range(1, 100))


def test_a_signal_asks(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(FileStore(str(tmp_path / "store"), 1), 0, 1) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert train_until_stopped(stop, threading.Barrier(1), None) >= 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_comes_twice_is_one_but_not_much_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [10.0], []
    monkeypatch.setattr("echelon.train.runs.stopping.time.monotonic", lambda: now[0])
    handle = on_sigterm(lambda: calls.append("first"), lambda: calls.append("second"))
    handle(15, None)
    now[0] += 0.1
    handle(15, None)
    assert calls == ["first"]
    now[0] += 2
    handle(15, None)
    assert calls == ["first", "second"]


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
        patch.setattr(stopping.TimeLimit, "_count", lambda _, step: step + 3)
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
