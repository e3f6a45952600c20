"""The checkpoints of a run, without ranks: which one a training goes on from, and at which batch."""

from pathlib import Path
from typing import Any, cast

import pytest

from echelon.engine import Engine
from echelon.errors import UserError
from echelon.train.checkpoints import Checkpoints
from echelon.train.job import Job
from tests.checkpoint.small import FILES, write_small


class StandIn:
    """An engine that returns what its checkpoints have as extra."""

    def __init__(self, **extras: Any) -> None:
        self._extras = extras

    def load(self, path: Path, *, verify: bool = True) -> dict[str, Any]:
        assert not verify, "it was just verified"
        step = int(path.name.removeprefix("step-"))
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
    assert checkpoints.go_back(15, 16) == (10, (10, 16))
    assert not _path(tmp_path, 20).exists()
    assert checkpoints.batch_of(11) == 16


def test_if_it_cannot_go_back_all_checkpoints_stay(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(tmp_path, 10, 20)
    _damage(tmp_path, 10)
    with pytest.raises(UserError, match="no checkpoint is whole"):
        checkpoints.go_back(15, 16)
    assert _path(tmp_path, 20).exists()
