"""Which run goes on, with which job."""

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import UserError
from echelon.train.jobs.job import Job, as_plain
from echelon.train.run import locked
from echelon.train.runs.resume import resume, runs_of
from echelon.train.runs.run_folder import RunFolder


def make_run(out: Path, state: str = "failed", saved: int | None = None, **changes: Any) -> Path:
    job = Job(out=str(out), **changes)
    folder = RunFolder.create(out, job.name, {"job": as_plain(job)})
    folder.mark(state, {})
    if saved is not None:
        (folder.path / "checkpoints" / f"step-{saved:08d}").mkdir(parents=True)
    return folder.path


def test_the_newest_run_that_has_not_finished(tmp_path: Path) -> None:
    make_run(tmp_path, steps=7)
    newest = make_run(tmp_path, steps=8)
    make_run(tmp_path, "finished", steps=9)
    make_run(tmp_path, steps=10, name="another")
    (tmp_path / "train-x").mkdir()
    continued = resume(None, [f"out={tmp_path}"], None)
    assert (continued.path, continued.job.steps) == (newest, 8)


def test_a_run_by_its_folder_with_another_plan(tmp_path: Path) -> None:
    run = make_run(tmp_path, saved=50, batch=8)
    continued = resume(run, ["steps=900", "save_every=5"], "data=4 zero=1")
    assert (continued.job.batch, continued.job.steps, continued.job.plan) == (8, 900, "data=4 zero=1")


def test_a_run_by_its_job_file(tmp_path: Path) -> None:
    run = make_run(tmp_path, batch=8, name="mine")
    job = tmp_path / "job.toml"
    job.write_text(f'out = "{tmp_path}"\nname = "mine"\nbatch = 8\nsteps = 900\n', encoding="utf-8")
    assert resume(job, [], None).path == run
    job.write_text(f'out = "{tmp_path}"\nname = "mine"\nbatch = 9\n', encoding="utf-8")
    with pytest.raises(UserError, match="batch=9: the run has batch=8"):
        resume(job, [], None)


def test_all_that_would_change_the_training_is_refused_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path, saved=50)
    with pytest.raises(UserError) as caught:
        resume(run, ["batch=4", "seed=3", "model.layers=1", "optimizer.clip=2.0", "steps=20"], None)
    assert [error.split("=")[0] for error in caught.value.errors] == [
        "batch",
        "seed",
        "optimizer.clip",
        "model.layers",
        "steps",
    ]
    assert "steps=20: the run has a checkpoint of step 50" in str(caught.value)


def test_a_finished_run_says_so_and_goes_on_with_more_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path, "finished", saved=600)
    with pytest.raises(UserError, match="the run has finished, after 600 steps"):
        resume(run, [], None)
    assert resume(run, ["steps=700"], None).job.steps == 700
    with pytest.raises(UserError, match=r"every run in .* has finished"):
        resume(None, [f"out={tmp_path}"], None)


def test_a_finished_run_and_fewer_steps_are_one_error_with_one_fix(tmp_path: Path) -> None:
    run = make_run(tmp_path, "finished", saved=600)
    with pytest.raises(UserError) as caught:
        resume(run, ["steps=8"], None)
    (error,) = caught.value.errors
    assert error.endswith("to train it for longer, set more: --set steps=1200")


def test_a_part_of_a_run_names_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, saved=4)
    for part in (run / "checkpoints", run / "checkpoints" / "step-00000004"):
        with pytest.raises(UserError) as caught:
            resume(part, [], None)
        assert str(caught.value) == f"--resume {part}: is a part of a run; give its folder: --resume {run}"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"job": 1}'])
def test_a_damaged_run_json_is_said_to_be_damaged(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"its run\.json is damaged"):
        resume(run, [], None)


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"job": 1}', '{"job": {"steps": "x"}}', "[" * 9999])
def test_a_folder_that_is_no_run(text: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if text is not None:
        (folder / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        resume(folder, [], None)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no run in"):
        resume(None, [f"out={tmp_path}"], None)


def test_names_are_taken_literally(tmp_path: Path) -> None:
    run = make_run(tmp_path, name="a[b]*")
    make_run(tmp_path, name="ab")
    assert list(runs_of(Job(out=str(tmp_path), name="a[b]*"))) == [run]


def test_one_process_at_a_time_trains_in_a_folder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UserError, match="is still being trained"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_events_are_kept_beside_the_state(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path))
    folder.note("restart", reason="rank 1 was killed")
    folder.note("resume")
    about = json.loads((folder.path / "run.json").read_text(encoding="utf-8"))
    assert about["state"] == "failed"
    assert [each["kind"] for each in about["events"]] == ["restart", "resume"]
