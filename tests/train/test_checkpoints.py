"""The checkpoints of a run, without ranks: which one a training goes on from, and at which batch."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from echelon.engine import Engine
from echelon.errors import UserError
from echelon.launching import RankFailed
from echelon.state.checkpoint.copies.folder import MemoryFolder
from echelon.state.checkpoint.saved import SavedState
from echelon.train.checkpoints import Checkpoints, loss_warning, memory_of_run
from echelon.train.events import FROM_DISK, Event, Noted, Restarting, RolledBack, Started
from echelon.train.jobs.job import Job, OptimizerJob
from echelon.train.jobs.job_rules import check
from echelon.train.runs import Preempted, supervisor
from echelon.train.runs.rollbacks import SKIPPED, Trouble
from echelon.train.runs.run_folder import RunFolder
from echelon.train.trainer import train
from tests.state.checkpoint.small import FILES, write_small
from tests.train.test_faults import at_step, kill_rank, step_lines, weights
from tests.train.test_trainer import small_job

TROUBLE = Trouble(15, 16, "the loss jumped")


class StandIn:
    """An engine that returns what its checkpoints have as extra."""

    def __init__(self, **extras: Any) -> None:
        self._extras, self.mesh = extras, SimpleNamespace(rank=0)

    def load_saved(self, saved: SavedState) -> dict[str, Any]:
        step = int(saved.path.name.removeprefix("step-"))
        plain = {"step": step, "next_batch": step, "skipped": [], "losses": None}
        return plain | cast(dict[str, Any], self._extras.get(f"step_{step}", {}))

    def synchronize(self) -> None:
        pass


def open_checkpoints(run: Path, *steps: int, **extras: Any) -> Checkpoints:
    for step in steps:
        write_small(_path(run, step), step=step)
    return Checkpoints(Job(), run, cast(Engine, StandIn(**extras)), lambda _: None)


def _path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def _damage(run: Path, step: int) -> None:
    (_path(run, step) / FILES[0]).unlink()


def test_going_back_removes_later_checkpoints(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, 10, 20)
    event = RolledBack(10, 16, "the loss jumped", 10, 16, 1, 3)
    assert checkpoints.roll_back(TROUBLE) == event
    assert checkpoints.rollbacks == (event,)
    assert not _path(tmp_path, 20).exists()
    assert checkpoints.batch_of(11) == 16


def test_if_it_cannot_go_back_all_checkpoints_stay(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, 10, 20)
    _damage(tmp_path, 10)
    with pytest.raises(UserError, match="no checkpoint is whole"):
        checkpoints.roll_back(TROUBLE)
    assert _path(tmp_path, 20).exists()


def test_batches_that_the_checkpoint_leaves_out_are_left_out_also_without_the_file(tmp_path: Path) -> None:
    saved = {"next_batch": 14, "skipped": [[6, 10]]}
    checkpoints = open_checkpoints(tmp_path, 10, step_10=saved)
    assert checkpoints.load_last() == 10
    assert checkpoints.batch_of(11) == 14
    (tmp_path / SKIPPED).write_text('{"rollbacks": 2, "skipped": [[6, 10], [14, 20]]}', encoding="utf-8")
    assert checkpoints.load_last() == 10
    assert checkpoints.batch_of(11) == 20
    assert checkpoints.num_rollbacks == 2


def test_a_file_that_leaves_out_what_was_trained_is_refused(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, 10)
    (tmp_path / SKIPPED).write_text('{"rollbacks": 1, "skipped": [[3, 5]]}', encoding="utf-8")
    with pytest.raises(UserError, match=r"the checkpoint of step 10 goes on with batch 10 .* be batch 12"):
        checkpoints.load_last()


def test_a_place_that_the_steps_do_not_lead_to_is_refused(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, 10, step_10={"next_batch": 11})
    with pytest.raises(UserError, match="goes on with batch 11"):
        checkpoints.load_last()


def test_what_is_left_out_is_on_the_disk_before_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, synced = open_checkpoints(tmp_path, 10, 20), list[str]()
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    checkpoints.roll_back(TROUBLE)
    assert synced[-2:] == [str(tmp_path / f".{SKIPPED}.part"), str(tmp_path)]


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


@pytest.mark.slow
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
