"""A command that is asked to end: its ranks end, its run is marked, its exit code says why."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from echelon.cli.signals import EXIT_CODE, Interrupted, Terminated, ctrl_c_keeps_notes, signals_raise
from echelon.train.runs import Preempted
from tests.cli.commands import training, wait_for


def test_sigterm_is_an_exception_inside_and_what_it_was_outside() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated, match=r"terminated \(SIGTERM\)"), signals_raise():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
    assert EXIT_CODE == 143


def test_a_second_sigterm_does_not_interrupt_the_clearing_up() -> None:
    cleared = []
    with pytest.raises(Terminated), signals_raise():  # noqa: PT012
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleared.append("all")
    assert cleared == ["all"]


def test_a_sigterm_after_all_is_saved_changes_nothing() -> None:
    with pytest.raises(Preempted), signals_raise():  # noqa: PT012
        try:
            raise Preempted(46)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_ctrl_c_at_once_does_not_interrupt_the_cleanup_but_a_later_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, done = signal.getsignal(signal.SIGINT), []

    def clean_up() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            done.append("cleanup")

    with pytest.raises(KeyboardInterrupt), signals_raise():
        clean_up()
    assert done == ["cleanup"]
    monkeypatch.setattr("echelon.cli.signals._TWICE_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt), signals_raise():
        clean_up()
    assert done == ["cleanup"]
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_raise():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_no_signal_changes_an_exit_code_that_is_decided() -> None:
    # The interpreter takes a while to exit. A SIGTERM then ended it with 143, although all was saved.
    code = (
        "import atexit, os, signal\n"
        "from echelon.cli.main import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGTERM)\n"
        "main(['bench', '--no-such-option'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_ctrl_c_keeps_what_was_noted_on_the_way() -> None:
    def stop() -> None:
        error = KeyboardInterrupt()
        error.add_note("step 7 was the last")
        raise error

    with pytest.raises(Interrupted, match="interrupted") as caught, ctrl_c_keeps_notes():
        stop()
    assert caught.value.__notes__ == ["step 7 was the last"]


def test_it_is_no_failure_that_code_on_the_way_may_catch() -> None:
    assert not issubclass(Terminated, Exception)


@pytest.mark.parametrize("where", ["another thread", "a later rank"])
def test_where_python_hears_no_signals_nothing_is_changed(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, inside = signal.getsignal(signal.SIGTERM), []

    def enter() -> None:
        with signals_raise():
            inside.append(signal.getsignal(signal.SIGTERM))

    if where == "another thread":
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    else:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        enter()
    assert inside == [before]


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_leaves_no_finished_run(tmp_path: Path) -> None:
    with training(tmp_path) as process:
        process.send_signal(2)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert re.fullmatch(rb"error: interrupted: step [1-9]\d* was the last; the run is in .*\n", err), err
    assert list(tmp_path.glob("*/loss.svg"))
    (state,) = [json.loads(path.read_text(encoding="utf-8"))["state"] for path in tmp_path.glob("*/run.json")]
    assert state == "failed"


@pytest.mark.slow
def test_sigterm_saves_the_run_ends_the_ranks_and_answers_in_json(tmp_path: Path) -> None:
    with training(tmp_path, "--json") as process:
        ranks = children_of(process.pid)
        assert ranks
        process.terminate()
        os.killpg(process.pid, signal.SIGTERM)  # as `timeout` does: also to the fork server
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (75, b"")
    assert json.loads(out)["exit_code"] == 75
    said = re.match(
        r"preempted \(SIGTERM\): step ([1-9]\d*) was the last, and is saved; go on with: echelon train "
        r"--resume (.*)",
        json.loads(out)["error"],
    )
    assert said
    (run,) = tmp_path.iterdir()
    assert said[2] == str(run)
    assert list(run.glob("loss.svg")), "the loss so far"
    assert [path.name for path in run.glob("checkpoints/step-*")] == [f"step-{int(said[1]):08d}"]
    about = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert about["state"] == "preempted"
    assert "SIGTERM" in about["reason"]
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


@pytest.mark.slow
def test_a_second_sigterm_some_time_later_ends_at_once(tmp_path: Path) -> None:
    with training(tmp_path) as process:
        ranks = [pid for pid in children_of(process.pid) if is_rank(pid)]
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)  # so that nothing can be saved
        process.terminate()
        time.sleep(1.5)
        process.terminate()
        _, err = process.communicate(timeout=300)
    assert process.returncode == 143
    said = (
        rb"error: terminated \(SIGTERM\): stopped by SIGTERM before saving; there is no checkpoint; go on "
        rb"with: echelon train --resume .*: step [1-9]"
    )
    assert re.match(said, err), err
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))


@pytest.mark.slow
def test_a_second_sigterm_during_the_save_leaves_nothing_half(tmp_path: Path) -> None:
    # A model that takes a while to write, and no other save that could be under way.
    large = [
        "model.layers=4",
        "model.width=512",
        "batch=2",
        "sequence=16",
        "save_every=0",
        "evaluate_every=0",
    ]
    with training(tmp_path, *(f"--set={setting}" for setting in large)) as process:
        ranks = [pid for pid in children_of(process.pid) if is_rank(pid)]
        began = time.monotonic()
        process.terminate()
        wait_for(lambda: list(tmp_path.glob("*/checkpoints/.*.part")), period=0.0005)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        time.sleep(max(0.0, began + 1.5 - time.monotonic()))
        process.terminate()
        _, err = process.communicate(timeout=300)
    assert process.returncode == 143
    assert b"stopped by SIGTERM before saving; there is no checkpoint; go on with" in err
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    (run,) = tmp_path.iterdir()
    assert list((run / "checkpoints").iterdir()) == []
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["state"] == "failed"
    again = [sys.executable, "-m", "echelon", "train", "--resume", str(run), "--set=steps=2"]
    subprocess.run(again, check=True, capture_output=True, timeout=300)
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["state"] == "finished"


def is_rank(pid: int) -> bool:
    """Ranks have sessions of their own."""
    return os.getsid(pid) == pid


def children_of(pid: int) -> list[int]:
    """All processes below `pid`."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="utf-8").split():
            pids += [int(child), *children_of(int(child))]
    return pids
