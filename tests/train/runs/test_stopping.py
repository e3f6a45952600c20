"""Ranks that are asked to stop agree on a step, whoever was asked and wherever each of them is."""

import os
import signal
import threading
from pathlib import Path

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from echelon.train.runs.stopping import StopRequest, on_sigterm


def train_until_stopped(stop: StopRequest, barrier: threading.Barrier, asks_at: int | None) -> int:
    """Steps of ranks that wait for each other in every step; the last one."""
    step = 0
    while stop.may_begin(step + 1):
        step += 1
        barrier.wait(20)
        if step == asks_at:
            stop.ask()
    return step


@pytest.mark.parametrize("asked", [0, 2])
def test_all_ranks_stop_after_the_same_step(asked: int, tmp_path: Path) -> None:
    ranks, lasts, barrier = 3, {}, threading.Barrier(3)

    def rank(number: int) -> None:
        store = FileStore(str(tmp_path / "store"), ranks)
        with StopRequest(store, number, ranks) as stop:
            lasts[number] = train_until_stopped(stop, barrier, 5 if number == asked else None)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(lasts.values())) == 1, lasts
    assert lasts[0] >= 5


@pytest.mark.parametrize("asks_at", ["before", "after"])
def test_ranks_that_go_back_meanwhile_stop_after_the_same_step(asks_at: str, tmp_path: Path) -> None:
    # A rollback from step 6 to step 3, once: the signal comes when rank 1 has not gone back yet, or has.
    ranks, lasts, barrier = 2, {}, threading.Barrier(2)

    def rank(number: int) -> None:
        store = FileStore(str(tmp_path / "store"), ranks)
        with StopRequest(store, number, ranks) as stop:
            step, has_gone_back = 0, False
            while stop.may_begin(step + 1):
                step += 1
                barrier.wait(20)
                if step == 6 and not has_gone_back:
                    if number == 1 and asks_at == "before":
                        stop.ask()
                        assert stop._agreed.wait(20)
                    step, has_gone_back = 3, True
                    barrier.wait(20)
                    if number == 1 and asks_at == "after":
                        stop.ask()
            lasts[number] = step

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(lasts) == ranks, "none waits for one that has stopped"
    assert lasts[0] == lasts[1]


def test_nobody_asks_and_nobody_stops(tmp_path: Path) -> None:
    with StopRequest(FileStore(str(tmp_path / "store"), 1), 0, 1) as stop:
        assert all(stop.may_begin(step) for step in range(1, 100))


def test_a_signal_asks(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(FileStore(str(tmp_path / "store"), 1), 0, 1) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert train_until_stopped(stop, threading.Barrier(1), None) >= 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_comes_twice_is_one_but_not_much_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [10.0], []
    monkeypatch.setattr("echelon.train.runs.stopping.time.monotonic", lambda: now[0])
    handle = on_sigterm(lambda: calls.append("first"), lambda: calls.append("second"))
    handle(15, None)
    now[0] += 0.1
    handle(15, None)
    assert calls == ["first"]
    now[0] += 2
    handle(15, None)
    assert calls == ["first", "second"]
