"""Ranks of this machine that survive faults: a rank that is lost costs the steps since the last checkpoint.

    rank 1 was killed  →  all ranks are ended, and new ones start from the last whole checkpoint

Ranks that are lost again and again before the next checkpoint end the run, after the job's `restarts`.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.engine.auto import ranks_here
from echelon.launching import RankFailed, Ranks, is_launched_rank, send_message
from echelon.plan import Plan
from echelon.train.checkpoints import checkpoint_folder, newest_step
from echelon.train.elastic import change
from echelon.train.events import Noted, Restarting
from echelon.train.job import Job
from echelon.train.loop import train_rank
from echelon.train.memory_copies import memory_of_run, newest_in_memory
from echelon.train.preempted import Preempted
from echelon.train.run import Run
from echelon.train.stop_request import on_sigterm

Fit = Callable[[Job], Job]  # the job for the devices that there are now


def supervise(job: Job, run: Run, fit: Fit) -> None:
    """Train to the end of the job; raises Preempted after SIGTERM, RankFailed after too many faults."""
    faults, fitted = _Faults(job, run), job
    with memory_of_run(job, run.folder.path), _Sigterm() as sigterm:
        while True:
            before, fitted = fitted, fit(job)
            if fitted != before:
                run.take(Noted(change(job, fitted)))
            checkpoint_folder(job, run.folder.path).remove_leftovers()
            try:
                last = _train(fitted, run, sigterm)
            except RankFailed as error:
                if sigterm.came:  # ranks that had just started did not know it yet
                    raise Preempted(newest_step(job, run.folder.path)) from error
                faults.add(error)
                continue
            if last is not None:
                raise Preempted(last)
            return


def _train(job: Job, run: Run, sigterm: "_Sigterm") -> int | None:
    """One attempt: the step at which ranks have stopped, or None at the end of the training."""
    with Ranks(ranks_here(Plan.parse(job.plan)), kills_at_once=True) as ranks, sigterm.forwarded_to(ranks):
        folder = run.folder.path
        stopped: list[int | None] = ranks.run(rank_main, job, folder, on_message=lambda _, e: run.take(e))
    return stopped[0]


def rank_main(job: Job, folder: Path) -> int | None:
    assert is_launched_rank()
    return train_rank(job, folder, send_message)


class _Faults:
    """Counts those since the last progress."""

    def __init__(self, job: Job, run: Run) -> None:
        self._job, self._run = job, run
        self._number, self._saved = 0, self._newest()

    def add(self, error: RankFailed) -> None:
        """Tell of a fault; raises it again where it is one too many."""
        saved = self._newest()
        if saved > self._saved:
            self._number, self._saved = 0, saved
        self._number += 1
        if self._number > self._job.restarts:
            if self._job.restarts:
                restarts = "1 restart" if self._job.restarts == 1 else f"{self._job.restarts} restarts"
                error.add_note(f"{restarts} since the last checkpoint did not help")
            raise error
        self._run.take(Restarting(f"rank {error.rank} {error.reason}", self._number, self._job.restarts))

    def _newest(self) -> int:
        run = self._run.folder.path
        return max(newest_step(self._job, run), newest_in_memory(self._job, run))


class _Sigterm:
    """SIGTERM of this process goes on to the ranks; another one, later, is what it was before."""

    def __init__(self) -> None:
        self.came = False
        self._ranks: Ranks | None = None

    def __enter__(self) -> "_Sigterm":
        self._is_heard = threading.current_thread() is threading.main_thread()
        if self._is_heard:
            self._before = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, on_sigterm(self._forward, self._give_back))
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_heard:
            signal.signal(signal.SIGTERM, self._before)

    @contextmanager
    def forwarded_to(self, ranks: Ranks) -> Iterator[None]:
        self._ranks = ranks
        try:
            if self.came:  # while they started
                self._forward()
            yield
        finally:
            self._ranks = None

    def _forward(self) -> None:
        self.came = True
        if self._ranks is not None:
            self._ranks.send_signal(signal.SIGTERM)

    def _give_back(self) -> None:
        signal.signal(signal.SIGTERM, self._before)
        signal.raise_signal(signal.SIGTERM)
