"""Ranks that are lost are started again, also with fewer devices; the run survives them."""

import dataclasses
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import UserError
from echelon.launching import RankFailed
from echelon.plan import Plan
from echelon.state.checkpoint.copies.folder import MemoryFolder
from echelon.state.checkpoint.copies.rank_file import HostCopies
from echelon.state.checkpoint.folder import CheckpointFolder
from echelon.train.events import Event, Noted, Started, Stepped
from echelon.train.jobs.job import Job, as_plain
from echelon.train.run import Logbook, open_run
from echelon.train.runs import Preempted, stopping, supervisor
from echelon.train.runs.run_folder import RunFolder
from echelon.train.runs.stopping import Sigterm
from echelon.train.runs.supervisor import change, fit_job, plans_for, supervise
from echelon.train.trainer import train
from tests.state.checkpoint.copies.host_files import make_other_version, write_copies
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
    monkeypatch.setattr(supervisor, "ranks_available", lambda: 3)
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


@pytest.mark.slow
def test_a_training_with_fewer_devices_says_so_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[Event] = []
    train(small_job(tmp_path, plan="data=2", steps=2), whole.append)
    monkeypatch.setattr(supervisor, "ranks_available", lambda: 1)
    shrunk: list[Event] = []
    train(small_job(tmp_path, plan="data=2", steps=2), shrunk.append, elastic=True)
    (note,) = [event for event in shrunk if isinstance(event, Noted)]
    assert "training with 'data=1'" in note.text
    losses = [[event.loss for event in events if isinstance(event, Stepped)] for events in (whole, shrunk)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


OnMessage = Callable[[int, Any], None]


class StandIn:
    """Two ranks. `play` is what they do; `signalled` is what they have got."""

    size = 2
    play: Callable[["StandIn", OnMessage], list[int | None]]

    def __init__(self, *_: object, **__: object) -> None:
        self.signalled: list[int] = []

    def __enter__(self) -> "StandIn":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send_signal(self, number: int) -> None:
        self.signalled.append(number)

    def run(self, *_: object, on_message: OnMessage) -> list[int | None]:
        return type(self).play(self, on_message)


def _supervise(out: Path, play: Callable[[StandIn, OnMessage], list[int | None]], **job: Any) -> None:
    made = Job(name="a", out=str(out), plan="data=2", **job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandIn, "play", play, raising=False)
        patch.setattr(supervisor, "Ranks", StandIn)
        with Sigterm() as sigterm, open_run(made, lambda _: None) as run:
            supervise(made, run, lambda job: job, sigterm)


def test_sigterm_waits_until_all_ranks_handle_it(tmp_path: Path) -> None:
    def play(ranks: StandIn, on_message: OnMessage) -> list[int | None]:
        os.kill(os.getpid(), signal.SIGTERM)
        on_message(0, supervisor._LISTENS)
        assert ranks.signalled == [], "rank 1 would be killed by it"
        on_message(1, supervisor._LISTENS)
        assert ranks.signalled == [signal.SIGTERM]
        return [7, 7]

    with pytest.raises(Preempted) as caught:
        _supervise(tmp_path, play)
    assert caught.value.step == 7


def test_sigterm_that_ends_ranks_while_they_start_loses_nothing(tmp_path: Path) -> None:
    """`timeout` sends it to the whole group, in which ranks are at their start."""

    def play(ranks: StandIn, on_message: OnMessage) -> list[int | None]:
        (run,) = tmp_path.iterdir()
        (run / "checkpoints" / "step-00000050").mkdir(parents=True)
        on_message(0, supervisor._LISTENS)
        os.kill(os.getpid(), signal.SIGTERM)
        raise RankFailed(1, "was killed by SIGTERM before it joined the others")

    with pytest.raises(Preempted) as caught:
        _supervise(tmp_path, play)
    assert caught.value.step == 50
    (run,) = tmp_path.iterdir()
    assert RunFolder(run).state == "preempted"


@pytest.mark.parametrize("error", [RankFailed(1, "was killed by SIGKILL"), UserError("no space is left")])
def test_ranks_that_fail_after_sigterm_have_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setenv("ECHELON_MEMORY_FOLDER", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()

    def no_space(*_: object, **__: object) -> None:
        raise UserError("no space is left for a checkpoint")

    def read_only(_: CheckpointFolder) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(HostCopies, "save", no_space)

    def play(_ranks: StandIn, on_message: OnMessage) -> list[int | None]:
        monkeypatch.setattr(CheckpointFolder, "remove_leftovers", read_only)  # from now on
        for rank in (0, 1):
            on_message(rank, supervisor._LISTENS)
        on_message(0, Started(42, 9000, "stdlib", "cpu"))
        (run,) = (tmp_path / "runs").iterdir()
        write_copies(MemoryFolder(run), 5)
        os.kill(os.getpid(), signal.SIGTERM)
        raise error

    with pytest.raises(type(error)) as caught:
        _supervise(tmp_path / "runs", play, keep="memory")
    assert str(error).splitlines()[0] in str(caught.value)
    (run,) = (tmp_path / "runs").iterdir()
    says = f"and step 5 is in the memory of this machine; go on with: echelon train --resume {run}"
    assert "stopped by SIGTERM before saving; there is no checkpoint, and" in str(caught.value)
    assert says in str(caught.value)
    assert RunFolder(run).state == "failed"
    assert len(list((tmp_path / "memory").iterdir())) == 1, "the copies stay"
    (note,) = RunFolder(run).about()["events"]
    assert note["text"].startswith(
        "the copies in memory stay there for 7 days, because they cannot be written: no space"
    )


def _resume(run: Path, job: Job, play: Callable[[StandIn, OnMessage], list[int | None]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandIn, "play", play, raising=False)
        patch.setattr(supervisor, "Ranks", StandIn)
        with Sigterm() as sigterm, open_run(job, lambda _: None, run) as opened:
            supervise(job, opened, lambda job: job, sigterm)


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Job]:
    """A run that was killed; its state after step 5 is in memory alone."""
    monkeypatch.setenv("ECHELON_MEMORY_FOLDER", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    job = Job(name="a", out=str(tmp_path / "runs"), plan="data=2", keep="memory")
    run = RunFolder.create(tmp_path / "runs", "a", {"job": as_plain(job)}).path
    write_copies(MemoryFolder(run), 5)
    return run, job


def test_copies_of_another_version_are_refused_before_ranks_start(killed: tuple[Path, Job]) -> None:
    run, job = killed
    make_other_version(MemoryFolder(run))

    def play(_ranks: StandIn, _on_message: OnMessage) -> list[int | None]:
        raise AssertionError("ranks would begin at step 1")

    with pytest.raises(UserError, match="is of version 1; this echelon reads version 2"):
        _resume(run, job, play)
    assert len(MemoryFolder(run).entries()) == 2, "the echelon that made them can go on"


def test_a_run_whose_keep_was_memory_goes_on_from_its_copies(killed: tuple[Path, Job]) -> None:
    run, job = killed
    on_disk: list[str] = []

    def play(_ranks: StandIn, _on_message: OnMessage) -> list[int | None]:
        on_disk.extend(path.name for path in (run / "checkpoints").glob("step-*"))
        return [None, None]

    _resume(run, dataclasses.replace(job, keep=2), play)
    assert on_disk == ["step-00000005"]
    assert not MemoryFolder(run).path.exists()


def test_a_second_sigterm_after_all_is_saved_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_TWICE_SECONDS", -1.0)

    def play(_ranks: StandIn, _on_message: OnMessage) -> list[int | None]:
        os.kill(os.getpid(), signal.SIGTERM)
        return [7, 7]

    def close(_logbook: Logbook, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def fail(*_: object) -> None:
        raise AssertionError("ended without its state")

    monkeypatch.setattr(Logbook, "close", close)
    before = signal.signal(signal.SIGTERM, fail)
    try:
        with pytest.raises(Preempted):
            _supervise(tmp_path, play)
        assert signal.getsignal(signal.SIGTERM) is fail
    finally:
        signal.signal(signal.SIGTERM, before)
    (run,) = tmp_path.iterdir()
    assert RunFolder(run).state == "preempted"


def test_progress_in_the_memory_of_ranks_of_a_smaller_plan_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the first fault --elastic trains data=3 on two ranks: their copies are progress, and other faults
    # not too many.
    monkeypatch.setenv("ECHELON_MEMORY_FOLDER", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    job = Job(name="a", out=str(tmp_path / "runs"), plan="data=3", keep="memory", restarts=1)
    attempts: list[int] = []

    def play(_ranks: StandIn, _on_message: OnMessage) -> list[int | None]:
        (run,) = (tmp_path / "runs").iterdir()
        attempts.append(len(attempts) + 1)
        if len(attempts) == 4:
            return [None, None]
        if len(attempts) > 1:
            write_copies(MemoryFolder(run), attempts[-1])
        raise RankFailed(1, "was killed by SIGKILL")

    monkeypatch.setattr(StandIn, "play", play, raising=False)
    monkeypatch.setattr(supervisor, "Ranks", StandIn)
    with Sigterm() as sigterm, open_run(job, lambda _: None) as run:
        plans = iter(["data=3", "data=2", "data=2", "data=2"])
        supervise(job, run, lambda job: dataclasses.replace(job, plan=next(plans)), sigterm)
    assert attempts == [1, 2, 3, 4]
