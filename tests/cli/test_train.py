"""`echelon train`: what is refused before anything is made, and runs that leave or lack a folder."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import output, train_command


def test_a_missing_job_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "nosuch2.toml").write_text("", encoding="utf-8")
    code, _, err = output(capsys, "train", str(tmp_path / "nosuch.toml"))
    assert code == 2
    assert "did you mean 'nosuch2.toml'?" in err


def test_all_errors_of_a_job_as_text_and_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("stps = 3\n[model]\nlayrs = 2\n", encoding="utf-8")
    code, _, err = output(capsys, "train", str(job))
    assert code == 2
    assert "did you mean 'steps'?" in err
    assert "did you mean 'layers'?" in err
    code, out, err = output(capsys, "train", str(job), "--json")
    assert (code, err) == (2, "")
    assert len(json.loads(out)["errors"]) == 2


@pytest.mark.parametrize(
    ("source", "says"),
    [("short.txt", "short.txt"), ("nowhere.txt", "nowhere.txt"), ("folder", "folder")],
)
def test_data_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str, says: str
) -> None:
    (tmp_path / "short.txt").write_text("too short", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    out = tmp_path / "runs"
    code, _, err = output(capsys, "train", "--set", f"data.source={tmp_path / source}", "--set", f"out={out}")
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert not out.exists()


def test_a_refused_job_shows_nothing_but_its_errors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = output(capsys, "train", "--plan", "data=2 expert=2", "--set", f"out={tmp_path / 'runs'}")
    assert (code, out) == (2, "")
    assert "has no experts that ranks can share out" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--plan", "tensor=3"],
            "error: 1 error in the job:\n  - plan 'tensor=3': config.heads=4 is not divisible",
        ),
        (["--plan", "pipeline=7 microbatches=7"], "cannot make 7 stages"),
        (["--plan", "pipeline=2 schedule=nowhere.txt"], "schedule 'nowhere.txt' cannot be read"),
        (["--set", "model.preset=llama3-405b"], "405,853,388,800 parameters take at least 5.9 TiB"),
        (["--plan", ""], "plan='': must not be empty"),
        (["--quiet", "0"], "Invalid value for '--quiet': Input should be greater than or equal to 1"),
        (["--plan", "data=２"], "data=２: numbers must be written with the digits 0 to 9"),
    ],
)
def test_an_impossible_job_starts_nothing_and_makes_no_folder(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    says: str,
) -> None:
    # Ranks started, refused the plan, and left a run folder.
    def start(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("echelon.train.runs.supervisor.Ranks", start)
    out = tmp_path / "runs"
    code, shown, err = output(capsys, "train", *options, "--set", f"out={out}")
    assert (code, shown) == (2, "")
    assert says in err
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_listed_with_the_other_errors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    code, _, err = output(capsys, "train", "--set", "steps=0", "--set", f"out={tmp_path / 'file' / 'runs'}")
    assert code == 2
    assert "2 errors in the job" in err
    assert "file is a file, not a folder; choose another folder with --set out=FOLDER" in err


@pytest.mark.slow
def test_any_stream_and_any_folder_name_will_do(tmp_path: Path) -> None:
    # An ASCII stream ended in UnicodeEncodeError, an ASCII locale at sample.txt, "[/x]" in MarkupError.
    out = tmp_path / "[/x]"
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [*train_command(out), "--set", "steps=2", "--set", "evaluate_every=0"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120, env=os.environ | ascii_only)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"starting ranks ..." in done.stdout
    assert b"->" in done.stdout
    assert b"[/x]" in done.stdout
    assert len(list(out.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
def test_a_full_disk_ends_a_run_with_a_clear_error(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let us mount")
    try:
        done = subprocess.run(train_command(disk), capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 2
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
        (state,) = [json.loads(path.read_text(encoding="utf-8"))["state"] for path in disk.glob("*/run.json")]
        assert state != "finished"
    finally:
        subprocess.run(["umount", str(disk)], check=True)
