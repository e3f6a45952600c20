"""A run folder is whole only when it says so."""

import errno
import json
import math
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import UserError
from echelon.train.export_run import export_run
from echelon.train.jobs.job import Job, as_plain
from echelon.train.runs import run_folder
from echelon.train.runs.resume import resume
from echelon.train.runs.rollbacks import SkippedBatches
from echelon.train.runs.run_folder import RunFolder, explain_os_errors, link_errors, read_about


def test_a_new_folder_is_running_then_finished(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", "a", {"plan": "data=2"})
    assert folder.state == "running"
    folder.mark("finished", {"summary": {"loss": 1.0}})
    kept = json.loads((folder.path / "run.json").read_text(encoding="utf-8"))
    assert (kept["state"], kept["plan"], kept["summary"]) == ("finished", "data=2", {"loss": 1.0})
    assert sorted(path.name for path in folder.path.iterdir()) == ["run.json"], "no temporary is left"


def test_two_runs_in_one_second_have_two_folders(tmp_path: Path) -> None:
    paths = {RunFolder.create(tmp_path, "a", {}).path for _ in range(3)}
    assert len(paths) == 3


def test_a_full_disk_is_a_clear_error_and_never_a_finished_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a", {})
    (folder.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl: No space left on device; free space"):
        folder.append("metrics.jsonl", [{"step": 1}])
    (folder.path / ".run.json.part").symlink_to("/dev/full")
    with pytest.raises(UserError, match="No space left"):
        folder.mark("finished", {})
    assert folder.state == "running"
    folder.fail("the disk is full")
    assert folder.state == "running"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot write .*--set out=FOLDER"):
        RunFolder.create(tmp_path / "file" / "runs", "a", {})


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a", {})
    folder.fail("ValueError: no")
    assert json.loads((folder.path / "run.json").read_text(encoding="utf-8"))["reason"] == "ValueError: no"
    assert folder.state == "failed"


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    # NaN and Infinity are no JSON, and most readers refuse the whole file.
    folder = RunFolder.create(tmp_path, "a", {"job": {"clip": math.inf}})
    folder.append("metrics.jsonl", [{"loss": math.nan, "all": [1.0, -math.inf]}])

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON")

    about = (folder.path / "run.json").read_text(encoding="utf-8")
    assert json.loads(about, parse_constant=refuse)["job"] == {"clip": None}
    line = (folder.path / "metrics.jsonl").read_text(encoding="utf-8")
    assert json.loads(line, parse_constant=refuse) == {"loss": None, "all": [1.0, None]}


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free space there"),
        (errno.ENAMETOOLONG, "choose a shorter name"),
        (errno.EACCES, "the right to write there"),
        (errno.ENOTDIR, "a part of the path is a file, not a folder"),
        (errno.EIO, "; choose another folder with --set out=FOLDER"),
    ],
)
def test_the_fix_fits_the_reason(number: int, fix: str) -> None:
    with pytest.raises(UserError) as caught, explain_os_errors(Path("x")):
        raise OSError(number, os.strerror(number))
    assert fix in str(caught.value)
    assert ("free space" in str(caught.value)) == (number == errno.ENOSPC)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="File name too long; choose a shorter name"):
        RunFolder.create(tmp_path, "a" * 400, {})


def test_a_folder_is_never_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Stopped":
            return cls(2026, 1, 1, tzinfo=tz)

    monkeypatch.setattr(run_folder, "datetime", Stopped)
    monkeypatch.setattr(run_folder, "MAX_RUNS_PER_SECOND", 3)
    for _ in range(3):
        RunFolder.create(tmp_path, "a", {})
    with pytest.raises(UserError, match="3 runs of this name began in this second"):
        RunFolder.create(tmp_path, "a", {})
    assert len(list(tmp_path.iterdir())) == 3


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
