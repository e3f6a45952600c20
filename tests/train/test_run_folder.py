"""A run folder is whole only when it says so."""

import json
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.train.run_folder import RunFolder


def test_a_new_folder_is_running_then_finished(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs", "a", {"plan": "data=2"})
    assert folder.state == "running"
    folder.mark("finished", {"summary": {"loss": 1.0}})
    kept = json.loads((folder.path / "run.json").read_text())
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
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*--set out=FOLDER"):
        RunFolder.create(tmp_path / "file" / "runs", "a", {})


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "a", {})
    folder.fail("ValueError: no")
    assert json.loads((folder.path / "run.json").read_text())["reason"] == "ValueError: no"
    assert folder.state == "failed"
