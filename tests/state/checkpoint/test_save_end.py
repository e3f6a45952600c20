"""Saves behind a training: their thread, and how long an end waits for it."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.state.checkpoint import save as save_module
from echelon.state.checkpoint.rank_save import SaveOptions
from echelon.state.checkpoint.save import _BackgroundSave
from echelon.state.checkpoint.snapshot import nothing
from tests.state.checkpoint.saving import check_saved, new_saver, save, state


def test_a_save_waits_unless_it_is_told() -> None:
    assert SaveOptions() == (True, None, 3, nothing)
    assert nothing(None) is False  # type: ignore[arg-type]


def test_a_thread_that_does_not_keep_the_program_alive_writes(tmp_path: Path) -> None:
    """That is what the finaliser is for: registered once, and called before that of ranks."""
    seen: list[threading.Thread] = []
    registered: list[tuple[Any, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            save_module,
            "Finalize",
            lambda *_, args, exitpriority: registered.append((args, exitpriority)),
        )
        saver = new_saver()
        for name in "ab":
            save(
                saver,
                tmp_path / name,
                state(),
                wait=False,
                then=lambda: seen.append(threading.current_thread()),
            )
        saver.finish()
    assert [(thread.name, thread.daemon) for thread in seen] == [("echelon-save", True)] * 2
    (((method,), priority),) = registered
    assert (method(), priority) == (saver._end, 100)
    check_saved(tmp_path / "b", state())


def test_a_save_that_waits_needs_no_finaliser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_module, "Finalize", None)
    save(new_saver(), tmp_path / "a", state())


class Target:
    def __init__(self) -> None:
        self.num_abandoned = 0

    def abandon(self) -> None:
        self.num_abandoned += 1


class Thread:
    """One that never ends, or has ended."""

    def __init__(self, *, is_alive: bool) -> None:
        self._is_alive, self.waited = is_alive, list[float]()

    def join(self, seconds: float) -> None:
        self.waited.append(seconds)

    def is_alive(self) -> bool:
        return self._is_alive


def running(thread: Any, error: Exception | None = None) -> tuple[_BackgroundSave, Target]:
    save: Any = SimpleNamespace(place="the place", target=Target())
    snapshot: Any = None
    each = _BackgroundSave(save, snapshot)
    each._thread, each.error = thread, error
    each.is_part_done.set()
    return each, save.target


@pytest.mark.parametrize(("is_failing", "seconds"), [(False, 600), (True, 5)])
def test_how_long_a_program_that_ends_waits(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_failing: bool,
    seconds: int,
) -> None:
    """Ten minutes, or 5 s after an error: other ranks may never be done."""
    clock, beats = [0.0], []
    thread = Thread(is_alive=True)
    thread.join = lambda passed: clock.__setitem__(0, clock[0] + passed)  # type: ignore[method-assign]
    monkeypatch.setattr(save_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(save_module, "beat", lambda: beats.append(1))
    monkeypatch.setattr(sys, "last_value", ValueError() if is_failing else None, raising=False)
    saver = new_saver()
    saver._running, _ = running(thread)
    saver._end()
    assert (clock[0], len(beats), saver._running) == (seconds, seconds - 1, None)
    assert "the save to the place failed: the program ended before" in capsys.readouterr().err
    saver._end()  # of which nothing is under way
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_alive", [True, False])
def test_what_is_given_up_is_removed_unless_a_thread_still_writes_there(is_alive: bool) -> None:
    saver, thread = new_saver(), Thread(is_alive=is_alive)
    saver._running, target = running(thread)
    stop = saver._running._stop
    saver.abandon()
    assert (stop.is_set(), thread.waited, saver._running) == (True, [5.0], None)
    assert target.num_abandoned == (0 if is_alive else 1)


def test_an_error_behind_the_training_is_raised_by_finish() -> None:
    saver = new_saver()
    saver._running, target = running(Thread(is_alive=False), OSError("the disk is full"))
    with pytest.raises(OSError, match="the disk is full"):
        saver.finish()
    assert (target.num_abandoned, saver._running) == (1, None)
    saver.finish()


def test_waiting_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    beats, answers = [], iter((False, False, True))
    monkeypatch.setattr(save_module, "beat", lambda: beats.append(1))
    asked: list[float] = []
    save_module._wait(lambda seconds: bool(asked.append(seconds)) or next(answers))
    assert (asked, len(beats)) == ([1.0] * 3, 2)
