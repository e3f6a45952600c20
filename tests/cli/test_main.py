"""Exit codes and messages: never a traceback for a user's mistake, all errors at once, pure JSON."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon import __version__
from echelon.cli.main import run


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--version") == (0, f"echelon {__version__}\n", "")
    code, out, _ = output(capsys, "train", "--help")
    assert code == 0
    assert "--plan" in out


@pytest.mark.parametrize("arguments", [["nonsense"], ["train", "--nonsense"], ["verify", "--steps", "x"]])
def test_bad_usage_is_exit_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = output(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


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


def test_errors_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "verify", "--plan", "data=0 tensor=x zero=7 schedule=zigzag")
    assert code == 2
    assert all(word in err for word in ("data=0", "tensor=x", "zero=7", "schedule=zigzag"))


def test_a_plan_that_cannot_run_yet(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "verify", "--plan", "recompute=full")
    assert code == 2
    assert "recompute=full is not implemented yet (only recompute=none)" in err
    assert "Traceback" not in err


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
    code, out, err = output(capsys, "train", "--plan", "recompute=full", "--set", f"out={tmp_path / 'runs'}")
    assert (code, out) == (2, "")
    assert "recompute=full is not implemented yet (only recompute=none)" in err
    assert not (tmp_path / "runs").exists()


def test_verify_judges_the_plan_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    # It proves in fp64, so a precision that cannot run was replaced before anybody looked at it.
    code, _, err = output(capsys, "verify", "--plan", "precision=fp16")
    assert code == 2
    assert "precision=fp16 is not implemented yet (only precision=fp64, precision=fp32," in err
    code, _, err = output(capsys, "verify", "--plan", "data=99999")
    assert code == 2
    assert "torchrun" in err


SMALL = [f"--set={setting}" for setting in ("model.layers=1", "model.width=32", "model.heads=2")]


def test_verify_passes_and_finds_an_injected_bug(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = output(capsys, "verify", "--plan", "data=2", "--steps", "3", "--json", *SMALL)
    verdict = json.loads(out)
    assert (code, verdict["equal"], err) == (0, True, "")
    assert verdict["worst"]["error"] <= 1e-9
    code, out, _ = output(
        capsys, "verify", "--plan", "data=2", "--steps=3", "--inject-bug=divide-twice", *SMALL
    )
    assert code == 1
    assert "DIFFERS" in out
    assert re.search(r"worst (?:tensor )?is (blocks|embedding|head|norm)\S*weight", " ".join(out.split())), (
        out
    )


def test_verify_does_not_run_under_torchrun_and_rank_0_alone_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "verify starts its own ranks: run it without torchrun"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, out, _ = output(capsys, "verify", "--json")
    assert (code, json.loads(out)) == (2, {"error": says, "errors": [], "exit_code": 2})
    monkeypatch.setenv("RANK", "1")
    assert output(capsys, "verify", "--json") == (2, "", f"error on rank 1: {says}\n")


def test_an_unknown_bug_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, "verify", "--inject-bug", "divide-twise")
    assert code == 2
    assert "did you mean 'divide-twice'?" in err


def train_command(out: Path) -> list[str]:
    return [sys.executable, "-m", "echelon", "train", "--set", f"out={out}", "--set", "steps=5000", *SMALL]


@contextmanager
def training(out: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A training of its own process, which does not outlive its test."""
    with subprocess.Popen(
        [*train_command(out), *options], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            wait_for(lambda: list(out.glob("*/metrics.jsonl")))
            yield process
        finally:
            process.kill()


def wait_for(condition, seconds: float = 60.0) -> None:  # type: ignore[no-untyped-def]
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it never came"
        time.sleep(0.05)


def test_ctrl_c_ends_everything_and_leaves_no_finished_run(tmp_path: Path) -> None:
    with training(tmp_path) as process:
        process.send_signal(2)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"interrupted" in err
    assert b"Traceback" not in err
    (state,) = [json.loads(path.read_text(encoding="utf-8"))["state"] for path in tmp_path.glob("*/run.json")]
    assert state == "failed"


def test_sigterm_marks_the_run_ends_the_ranks_and_answers_in_json(tmp_path: Path) -> None:
    with training(tmp_path, "--json") as process:
        ranks = children_of(process.pid)
        assert ranks
        process.terminate()
        process.terminate()  # as `timeout` does
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (143, b"")
    assert json.loads(out)["exit_code"] == 143
    assert "SIGTERM" in json.loads(out)["error"]
    (about,) = [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*/run.json")]
    assert about["state"] == "failed"
    assert "SIGTERM" in about["reason"]
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


def children_of(pid: int) -> list[int]:
    """All processes below `pid`."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="utf-8").split():
            pids += [int(child), *children_of(int(child))]
    return pids


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
