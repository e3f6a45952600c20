"""Run folders of strangers: nothing is written where their links lead."""

import json
import os
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.train.export_run import export_run
from echelon.train.jobs.job import Job, as_plain
from echelon.train.runs.resume import resume
from echelon.train.runs.rollbacks import SkippedBatches
from echelon.train.runs.run_links import link_errors
from echelon.train.runs.run_state import read_about


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"state": "failed", "job": as_plain(Job())}))
    return folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/.latest.part", "model"])
def test_a_run_with_a_link_does_not_go_on(run: Path, tmp_path: Path, name: str) -> None:
    assert resume(run, (), None).path == run
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError) as refusal:
        resume(run, (), None)
    assert f"{run / name}: is a link" in str(refusal.value)


def test_a_run_with_a_pipe_does_not_go_on(run: Path) -> None:
    os.mkfifo(run / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics.jsonl: is a pipe, socket or device"):
        resume(run, (), None)


@pytest.mark.parametrize("name", ["run.json", "skipped_batches.json"])
def test_a_file_without_an_end_is_not_read(run: Path, name: str) -> None:
    (run / name).touch()
    os.truncate(run / name, 2**42)  # takes no room on the disk
    if name == "run.json":
        assert read_about(run) is None
    else:
        with pytest.raises(UserError, match="has 4398046511104 bytes; must have 67108864 at most"):
            SkippedBatches.read(run / name)


@pytest.mark.parametrize("name", ["export", "export/hf"])
def test_nothing_is_exported_through_a_link(run: Path, tmp_path: Path, name: str) -> None:
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(tmp_path)
    with pytest.raises(UserError, match="is a link"):
        export_run(run, "hf")


def test_many_links_are_told_in_short(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / str(number)).symlink_to("/")
    assert len(link_errors(tmp_path)) == 6
