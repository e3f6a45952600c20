"""Watchdogs of several ranks in one process: each has a thread, all share a store, `end` ends nothing."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from echelon.launching.watch import watchdog
from echelon.launching.watch.pulse import Pulse
from echelon.launching.watch.watchdog import EXIT_CODE, Watchdog
from tests.launching.processes import wait_until
from tests.ports import free_port

WAITS = Pulse(0, 3, 2, "all_reduce data", "REDUCE of stage 0", 7, True)
WORKS = Pulse(0, 2, 2, "all_reduce data")
LONG = 30.0  # seconds: longer than any test may take, and never reached


class Rank:
    """What one watchdog sees and does."""

    def __init__(self, store: Any, rank: int, ranks: int, pulse: Pulse, **options: Any) -> None:
        self.pulse, self.is_over = pulse, False
        self.reports: list[str] = []
        self.codes: list[int] = []
        options = {"deadline": 0.3, "lost_seconds": LONG} | options
        self.watchdog = Watchdog(
            store,
            rank,
            ranks,
            read_pulse=lambda: self.pulse,
            is_over=lambda: self.is_over,
            end=self.codes.append,
            write=self.reports.append,
            **options,
        )
        self.watchdog.start()

    @property
    def has_ended(self) -> bool:
        return bool(self.codes)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Rank]]]:
    """Starts a rank for each pulse; `options` are those of every watchdog."""
    monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", 1.0)
    store, started = HashStore(), []

    def start(*pulses: Pulse, ranks: int = 0, **options: Any) -> list[Rank]:
        for rank, pulse in enumerate(pulses):
            started.append(Rank(PrefixStore("a", store), rank, ranks or len(pulses), pulse, **options))
        return started

    yield start
    for rank in started:
        rank.watchdog.leave()


def test_every_rank_reports_where_all_ranks_are_and_ends(start: Callable[..., list[Rank]]) -> None:
    ranks = start(WAITS, WORKS, WAITS)
    assert wait_until(lambda: all(rank.has_ended for rank in ranks), LONG)
    for number, rank in enumerate(ranks):
        assert rank.codes == [EXIT_CODE]
        (report,) = rank.reports
        lines = report.splitlines()
        assert lines[0].startswith(
            f"echelon, rank {number}: rank 1 seems to block the others: it works outside any operation, "
            "after 2 operations, in "
        )
        assert lines[0].endswith("no rank gave a sign of life for 0.3 s")
        state = "is in step 7, at REDUCE of stage 0, waits in all_reduce data (operation 3)"
        assert lines[1] == f"  ranks 0, 2, each: {state}"
        assert lines[2].startswith("  rank 1 works outside any operation, after 2 operations, in ")
        assert f"stack of rank {number}:" in report
        assert "stack of rank 1:" in report
        assert "wait_until" in report, "the stack of the main thread"


def test_ranks_that_only_work_may_take_any_time(start: Callable[..., list[Rank]]) -> None:
    ranks = start(WORKS, WORKS, deadline=0.05)
    assert not wait_until(lambda: any(rank.reports for rank in ranks), 0.5)


def test_a_rank_whose_gpu_has_work_waits(start: Callable[..., list[Rank]]) -> None:
    ranks = start(WORKS, WORKS, is_device_busy=lambda: True)
    assert wait_until(lambda: all(rank.has_ended for rank in ranks), LONG)


def test_a_rank_that_goes_on_keeps_the_others_waiting(start: Callable[..., list[Rank]]) -> None:
    """Rank 0 waits far longer than the deadline; the first rank to be silent for that long ends all."""
    ranks = start(WAITS, WORKS, deadline=0.5)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        ranks[1].pulse = ranks[1].pulse._replace(beats=ranks[1].pulse.beats + 1)
        time.sleep(0.02)
    assert not any(rank.reports for rank in ranks)
    assert wait_until(lambda: all(rank.has_ended for rank in ranks), LONG)


def test_ranks_that_still_join_are_given_time(start: Callable[..., list[Rank]]) -> None:
    ranks = start(WAITS, WORKS, deadline=0.2)
    for rank in ranks:
        rank.watchdog.is_joining = True
    assert not wait_until(lambda: any(rank.reports for rank in ranks), 1.0)


def test_an_error_of_one_rank_ends_the_others_at_once(start: Callable[..., list[Rank]]) -> None:
    ranks = start(WAITS, WORKS, deadline=LONG)
    ranks[1].watchdog.fail("raised KeyError: 'lr'")
    assert wait_until(lambda: bool(ranks[0].reports), LONG)
    first, second, third, *_ = ranks[0].reports[0].splitlines()
    assert first == "echelon, rank 0: rank 1 raised KeyError: 'lr'"
    assert second.startswith("  rank 0 is in step 7, ")
    assert third == "  rank 1 raised KeyError: 'lr'"
    assert not ranks[1].reports, "it has its own traceback"
    assert wait_until(lambda: ranks[0].has_ended, LONG)


@pytest.mark.slow
def test_the_root_cause_is_named_and_not_its_consequence(start: Callable[..., list[Rank]]) -> None:
    ranks = start(WAITS, WORKS, WORKS, deadline=LONG)
    lose, fail = (rank.watchdog.fail for rank in ranks[1:])
    fails = [
        threading.Thread(target=lose, args=("raised PeerLost",), kwargs={"lost_peer": True}),
        threading.Thread(target=fail, args=("raised MemoryError",)),
    ]
    for thread in fails:
        thread.start()
        time.sleep(0.1)
    assert wait_until(lambda: bool(ranks[0].reports), LONG)
    assert ranks[0].reports[0].startswith("echelon, rank 0: rank 2 raised MemoryError")
    for thread in fails:
        thread.join()


def test_an_error_that_all_ranks_raise_is_left_to_them(start: Callable[..., list[Rank]]) -> None:
    ranks = start(WORKS, WORKS, deadline=LONG)
    threads = [threading.Thread(target=rank.watchdog.fail, args=("raised UserError",)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(rank.reports or rank.codes for rank in ranks)


def test_a_rank_that_has_ended_in_order_may_leave_the_others_at_work(
    start: Callable[..., list[Rank]],
) -> None:
    ranks = start(WORKS, WORKS, WORKS, lost_seconds=0.3)
    ranks[1].is_over = True
    assert not wait_until(lambda: any(rank.reports for rank in ranks), 1.0)
    ranks[0].pulse = WAITS
    assert wait_until(lambda: ranks[0].has_ended and ranks[2].has_ended, LONG)
    assert "  rank 1 has ended\n" in ranks[0].reports[0]
    assert not ranks[1].reports


def test_a_rank_whose_heart_stands_still_is_lost(start: Callable[..., list[Rank]]) -> None:
    """Its process is gone, or its interpreter is blocked: it cannot say where it is."""
    ranks = start(WORKS, WORKS, WORKS, deadline=1.0, lost_seconds=0.5)
    hearts = ranks[2].watchdog._store
    assert wait_until(lambda: hearts.add("heart/2", 0) > 0, LONG)
    ranks[2].watchdog._stop.set()  # without a word to the others
    assert wait_until(lambda: all(rank.has_ended for rank in ranks[:2]), LONG)
    assert ranks[0].reports[0].startswith("echelon, rank 0: rank 2 gives no answer: its process or its host")
    assert "rank 2 has been silent for 0.5 s" in ranks[0].reports[0].splitlines()[0]


def test_what_was_asked_for_is_done_before_the_end(start: Callable[..., list[Rank]]) -> None:
    ranks = start(WAITS, WORKS, deadline=LONG)
    reasons: list[str] = []
    ranks[0].watchdog.when_ended += [lambda _: 1 / 0, reasons.append]
    ranks[1].watchdog.fail("raised KeyError: 'lr'")
    assert wait_until(lambda: ranks[0].has_ended, LONG)
    assert reasons == ["rank 1 raised KeyError: 'lr'"]


SCRIPT = Path(__file__).parents[1] / "scripts" / "hanging.py"


def run(way: str, ranks: int = 2, deadline: str = "3") -> tuple[int, str]:
    """The exit code of torchrun, and what all its ranks printed."""
    options = (f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={free_port()}")
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), way],
        env=os.environ | {"ECHELON_DEADLINE": deadline, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    return ran.returncode, ran.stdout


def reports(printed: str, ranks: int) -> list[str]:
    """The report of each rank, without who it is: each has printed one."""
    found = []
    for rank in range(ranks):
        name = f"^echelon, rank {rank}: "
        (report,) = re.findall(f"{name}(rank .*?){name}ends", printed, re.MULTILINE | re.DOTALL)
        found.append(report)
    return found


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_by_all() -> None:
    code, printed = run("sleep_before_a_collective", ranks=3)
    assert code != 0
    for report in reports(printed, 3):
        assert report.startswith("rank 1 seems to block the others: it works outside any operation, after ")
        assert "  ranks 0, 2, each: waits in all_reduce data (operation " in report
        assert "in sleep_before_a_collective\n    time.sleep(600)" in report, "the stack of rank 1"


@pytest.mark.slow
def test_a_rank_in_another_branch_is_named() -> None:
    code, printed = run("take_another_branch", ranks=3)
    assert code != 0
    for report in reports(printed, 3):
        assert report.startswith("rank 1 is in another operation than others: it waits in barrier data")


@pytest.mark.slow
def test_a_rank_that_sleeps_in_a_pipeline_is_named_with_step_and_microbatch() -> None:
    code, printed = run("sleep_in_a_pipeline")
    assert code != 0
    for report in reports(printed, 2):
        waits = "  rank 0 is in step 2, at RG0 of stage 0, microbatch 0, waits in recv pipeline (operation "
        assert waits in report
        assert "  rank 1 is in step 2, at F0 of stage 1, microbatch 0, works outside any operation" in report


@pytest.mark.slow
def test_an_error_of_one_rank_ends_the_others_long_before_the_deadline() -> None:
    code, printed = run("raise_an_error", deadline="10000")
    assert code != 0
    assert "echelon, rank 0: rank 1 raised ValueError: the learning rate went for a walk\n" in printed
    assert re.search(r"Root Cause.*?rank +: 1 ", printed, re.S), "torchrun names the rank that raised"


@pytest.mark.slow
def test_an_error_of_all_ranks_is_reported_by_each_of_them_alone() -> None:
    code, printed = run("raise_on_all_ranks", ranks=3, deadline="10000")
    assert code != 0
    assert "echelon, rank" not in printed
    assert "ValueError: all ranks see that the batch is empty" in printed


@pytest.mark.slow
@pytest.mark.parametrize("way", ["die", "end_early"])
def test_a_rank_that_is_gone_ends_the_others_long_before_the_deadline(way: str) -> None:
    code, printed = run(way, deadline="10000")
    assert code != 0
    assert "is done" not in printed


@pytest.mark.slow
def test_a_rank_that_gives_signs_of_life_and_ranks_that_wait_for_nobody_go_on() -> None:
    code, printed = run("work_slowly", deadline="2")
    assert code == 0, printed
    assert sorted(re.findall(r"rank \d is done", printed)) == ["rank 0 is done", "rank 1 is done"]


@pytest.mark.slow
def test_a_deadline_that_means_nothing_is_refused() -> None:
    code, printed = run("work_slowly", deadline="soon")
    assert code != 0
    assert "ECHELON_DEADLINE='soon' in the environment: must be more than 0 seconds, or none" in printed
