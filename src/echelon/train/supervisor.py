"""Ranks of this machine that survive faults: a rank that is lost costs the steps since the last checkpoint.

    rank 1 was killed  →  all ranks are ended, and new ones start from the last whole checkpoint

Ranks that are lost again and again before the next checkpoint end the run, after the job's `restarts`.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from echelon.engine.auto import ranks_here
from echelon.errors import UserError
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

_LISTENS = "a rank handles SIGTERM from now on"  # the first message of each

Fit = Callable[[Job], Job]  # the job for the devices that there are now


def supervise(job: Job, run: Run, fit: Fit) -> None:
    """Train to the end of the job; raises Preempted after SIGTERM, RankFailed after too many faults, or after
    SIGTERM: then nobody knows whether ranks had saved."""
    faults, fitted = _Faults(job, run), job
    with memory_of_run(job, run.folder.path) as memory, _Sigterm() as sigterm:
        while True:
            before, fitted = fitted, fit(job)
            if fitted != before:
                run.take(Noted(change(job, fitted)))
            checkpoint_folder(job, run.folder.path).remove_leftovers()
            try:
                last = _train(fitted, run, sigterm)
            except (RankFailed, UserError) as error:
                if sigterm.came and run.logbook.has_started:
                    memory.stays = newest_in_memory(fitted, run.folder.path) > 0
                    raise _not_saved(error, fitted, run.folder.path) from error
                if sigterm.came or isinstance(error, UserError):
                    raise
                faults.add(error)
                continue
            if last is not None:
                raise Preempted(last)
            return


def _train(job: Job, run: Run, sigterm: "_Sigterm") -> int | None:
    """One attempt: the step at which ranks have stopped, or None at the end of the training."""
    with Ranks(ranks_here(Plan.parse(job.plan)), kills_at_once=True) as ranks, sigterm.forwarded_to(ranks):

        def take(rank: int, message: Any) -> None:
            if message == _LISTENS:
                sigterm.add_listener(rank)
            else:
                run.take(message)

        stopped: list[int | None] = ranks.run(rank_main, job, run.folder.path, on_message=take)
    return stopped[0]


def rank_main(job: Job, folder: Path) -> int | None:
    assert is_launched_rank()
    # At its end too: a rank that has saved must not be killed by what asks it to save.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    return train_rank(job, folder, send_message, lambda: send_message(_LISTENS))


def _not_saved(error: RankFailed | UserError, job: Job, run: Path) -> RankFailed | UserError:
    """The error, with what there is to go on from."""
    on_disk, in_memory = newest_step(job, run), newest_in_memory(job, run)
    kept = f", and of step {in_memory} in the memory of this machine" if in_memory else ""
    note = (
        f"SIGTERM had come, and this was not saved; there is a checkpoint of step {on_disk}{kept} (0: "
        f"none); go on with: echelon train --resume {run}"
    )
    if isinstance(error, UserError):
        return UserError(error.title, [*error.errors, note])
    return type(error)(error.rank, error.reason, error.traceback, [*error.others, note])


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
    """SIGTERM of this process goes on to the ranks, when all of them handle it; another one, later, is what
    it was before."""

    def __init__(self) -> None:
        self.came = False
        self._ranks: Ranks | None = None
        self._listeners: set[int] = set()

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
        self._ranks, self._listeners = ranks, set()
        try:
            yield
        finally:
            self._ranks = None

    def add_listener(self, rank: int) -> None:
        """From now on this rank handles the signal, which may have come before."""
        self._listeners.add(rank)
        if self.came:
            self._forward()

    def _forward(self) -> None:
        self.came = True
        if self._ranks is not None and len(self._listeners) == self._ranks.size:
            self._ranks.send_signal(signal.SIGTERM)

    def _give_back(self) -> None:
        signal.signal(signal.SIGTERM, self._before)
        signal.raise_signal(signal.SIGTERM)
