"""keep='memory': a lost rank costs the steps since the last copy, and no read of a disk."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.launching import RankFailed
from echelon.state.checkpoint.copies.folder import MemoryFolder
from echelon.train.events import FROM_DISK, Event, Noted, Restarting, Started
from echelon.train.jobs.job import Job, OptimizerJob
from echelon.train.jobs.job_rules import check
from echelon.train.runs import Preempted, supervisor
from echelon.train.runs.memory_copies import loss_warning, memory_of_run
from echelon.train.runs.run_folder import RunFolder
from echelon.train.trainer import train
from tests.train.test_faults import at_step, kill_rank, step_lines, weights
from tests.train.test_trainer import small_job


@pytest.fixture
def ram_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "ram"
    root.mkdir()
    monkeypatch.setenv("ECHELON_MEMORY_FOLDER", str(root))
    return root


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Noted)]


def test_a_killed_rank_goes_on_from_memory(tmp_path: Path, ram_disk: Path) -> None:
    job = small_job(tmp_path / "runs", steps=7, save_every=1, keep="memory", evaluate_every=0)
    undisturbed = Path(train(job, lambda _: None)["run"])
    events: list[Event] = []
    run = Path(train(job, at_step(5, lambda: kill_rank(1), events))["run"])
    assert len([event for event in events if isinstance(event, Restarting)]) == 1
    _, after = (event.after_step for event in events if isinstance(event, Started))
    assert after >= 3, "copies after steps 4 and 5 may be under way; ranks may be ahead of events"
    assert [event.source for event in events if isinstance(event, Started)][1] == "from memory"
    assert weights(run) == weights(undisturbed)
    assert step_lines(run) == step_lines(undisturbed)
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000007"]
    assert list(ram_disk.iterdir()) == []


def test_after_the_last_restart_the_newest_copy_is_on_disk(tmp_path: Path, ram_disk: Path) -> None:
    rate = OptimizerJob(schedule="constant", warmup=2)
    job = small_job(
        tmp_path / "runs", steps=7, save_every=1, keep="memory", restarts=0, evaluate_every=0, optimizer=rate
    )
    events: list[Event] = []
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        train(job, at_step(5, lambda: kill_rank(1), events))
    (run,) = (tmp_path / "runs").iterdir()
    (name,) = [path.name for path in (run / "checkpoints").glob("*-*")]
    saved = int(name.removeprefix("step-"))
    assert saved >= 3, "copies after steps 4 and 5 may be under way; ranks may be ahead of events"
    assert notes(events) == [f"step {saved}: the copy in memory is a checkpoint on disk now"]
    assert list(ram_disk.iterdir()) == []
    resumed: list[Event] = []
    train(job, resumed.append, resume=run)
    assert [event.after_step for event in resumed if isinstance(event, Started)] == [saved]
    undisturbed = Path(train(dataclasses.replace(job, out=str(tmp_path / "b")), lambda _: None)["run"])
    assert weights(run) == weights(undisturbed)
    assert step_lines(run) == step_lines(undisturbed)


@pytest.mark.parametrize("keep", [2, "memory"])
def test_another_run_leaves_the_copies_of_a_killed_one(
    keep: int | str, tmp_path: Path, ram_disk: Path
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    folders = {}
    for state in ("running", "failed", "finished", "deleted"):
        run = RunFolder.create(tmp_path, state, {"job": {}})
        run.mark(state, {})
        folders[state] = MemoryFolder(run.path)
        folders[state].make(ended.pid)
    shutil.rmtree(run.path)
    ended.wait()
    with memory_of_run(small_job(tmp_path, keep=keep, save_every=1), tmp_path / "another"):
        assert [state for state in folders if folders[state].path.exists()] == ["running", "failed"]


@pytest.mark.slow
def test_ranks_of_another_plan_go_on_from_the_copies(
    tmp_path: Path, ram_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, events = [2], list[Event]()
    monkeypatch.setattr(supervisor, "ranks_available", lambda: devices[0])

    def lose_a_device() -> None:
        devices[0] = 1
        kill_rank(1)

    job = small_job(tmp_path / "runs", steps=7, save_every=1, keep="memory", evaluate_every=0)
    run = Path(train(job, at_step(5, lose_a_device, events), elastic=True)["run"])
    _, after = (event.after_step for event in events if isinstance(event, Started))
    assert after in (3, 4, 5)
    written, fitted = notes(events)
    assert written == f"step {after}: the copy in memory is a checkpoint on disk now"
    assert "training with 'data=1'" in fitted
    undisturbed = Path(train(dataclasses.replace(job, out=str(tmp_path / "b")), lambda _: None)["run"])
    losses = [[loss for _, loss in step_lines(each)] for each in (run, undisturbed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert list(ram_disk.iterdir()) == []


def test_copies_need_steps_between_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keep='memory' save_every=0: no copy would be made"):
        check(small_job(tmp_path, save_every=0, keep="memory"))


def test_under_torchrun_a_job_that_could_lose_everything_is_warned_of() -> None:
    assert "set keep_every" in loss_warning(Job(keep="memory", keep_every=0))
    assert loss_warning(Job(keep="memory", keep_every=100)) == ""
    assert loss_warning(Job(keep=2, keep_every=0)) == ""


def test_a_ram_disk_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_MEMORY_FOLDER", str(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"missing is not a folder; set ECHELON_MEMORY_FOLDER"):
        train(small_job(tmp_path / "runs", save_every=1, keep="memory"), lambda _: None)
    assert list((tmp_path).glob("runs/*")) == []


def test_a_server_owns_all_weights_so_copies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="with sync=parameter-server the server owns all weights"):
        check(small_job(tmp_path, save_every=1, keep="memory", plan="data=2 sync=parameter-server"))


@pytest.mark.slow
def test_damaged_copies_are_passed_over_for_the_disk(tmp_path: Path, ram_disk: Path) -> None:
    job = small_job(tmp_path / "runs", steps=8, save_every=1, keep_every=3, keep="memory", evaluate_every=0)
    undisturbed = Path(train(job, lambda _: None)["run"])
    events: list[Event] = []

    def damage_and_kill() -> None:
        for rank in (0, 1):  # neither writes behind this
            kill_rank(rank)
        for path in ram_disk.glob("*/*/rank-00000.safetensors"):
            path.write_bytes(b"\0" * path.stat().st_size)

    run = Path(train(job, at_step(6, damage_and_kill, events))["run"])
    _, after = (event.after_step for event in events if isinstance(event, Started))
    assert after in (0, 3, 6), "on disk"
    assert any("rank-00000.safetensors: is damaged" in text for text in notes(events))
    assert all(event.source == FROM_DISK for event in events if isinstance(event, Started))
    assert weights(run) == weights(undisturbed)
    assert step_lines(run) == step_lines(undisturbed)
    assert list(ram_disk.iterdir()) == []


@pytest.mark.slow
def test_sigterm_saves_on_disk_and_leaves_nothing_in_memory(tmp_path: Path, ram_disk: Path) -> None:
    rate = OptimizerJob(schedule="constant", warmup=2)
    job = small_job(
        tmp_path / "runs", steps=5000, save_every=1, keep="memory", evaluate_every=0, optimizer=rate
    )
    with pytest.raises(Preempted) as caught:
        train(job, at_step(3, lambda: os.kill(os.getpid(), signal.SIGTERM), []))
    (run,) = (tmp_path / "runs").iterdir()
    names = [path.name for path in (run / "checkpoints").glob("step-*")]
    assert names == [f"step-{caught.value.step:08d}"], "though there was a copy of that step in memory"
    assert list(ram_disk.iterdir()) == []
