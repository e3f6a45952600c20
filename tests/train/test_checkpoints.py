"""The checkpoints of a run, without ranks: which one a training goes on from, and at which batch."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from echelon.engine import Engine
from echelon.errors import UserError
from echelon.state.checkpoint.saved import SavedState
from echelon.train.checkpoints import Checkpoints
from echelon.train.events import RolledBack
from echelon.train.jobs.job import Job
from echelon.train.runs.rollbacks import SKIPPED, Trouble
from tests.state.checkpoint.small import FILES, write_small

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
