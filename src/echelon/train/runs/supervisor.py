"""Ranks of this machine that survive faults: a rank that is lost costs the steps since the last checkpoint.

    rank 1 was killed  →  all ranks are ended, and new ones start from the last whole checkpoint

Ranks that are lost again and again before the next checkpoint end the run, after the job's `restarts`.
With `--elastic`, new ranks may be fewer: the data degree of the plan shrinks, and the global batch stays.

    data=4 zero=3, and 3 devices  →  data=3 zero=3
"""

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch

from echelon.engine.auto import ranks_here
from echelon.errors import UserError
from echelon.launching import RankFailed, Ranks, is_launched_rank, send_message
from echelon.launching.torchrun import is_under_torchrun
from echelon.plan import AUTO, Plan
from echelon.quantities import counted
from echelon.state.checkpoint.copies.folder import DAYS_KEPT, MemoryFolder, forget_all
from echelon.state.checkpoint.copies.rank_file import HostCopies
from echelon.train.checkpoints import (
    RunMemory,
    checkpoint_folder,
    folder_of,
    is_in_memory,
    memory_of_run,
    newest_in_memory,
    newest_step,
)
from echelon.train.events import Noted, Restarting
from echelon.train.jobs.job import Job
from echelon.train.jobs.job_rules import job_errors
from echelon.train.jobs.machine_fit import most_ranks_here
from echelon.train.loop import train_rank
from echelon.train.run import Run
from echelon.train.runs import Preempted
from echelon.train.runs.stopping import Sigterm


def fit_job(job: Job) -> Job:
    """The job with a plan for the ranks or devices that there are; unchanged if none fits, or all is well."""
    try:
        plan = Plan.parse(job.plan)
    except UserError:
        return job
    for smaller in plans_for(plan, ranks_available(), exactly=is_under_torchrun()):
        fitted = dataclasses.replace(job, plan=str(smaller))
        if smaller == plan:
            return job
        if not job_errors(fitted):
            return fitted
    return job


def change(job: Job, fitted: Job) -> str:
    return (
        f"elastic: {ranks_available()} {'ranks' if is_under_torchrun() else 'devices'} for the plan "
        f"'{job.plan}'; training with '{fitted.plan}', and the same global batch of {job.batch}"
    )


def ranks_available() -> int:
    """Under torchrun the ranks that were started; else one for each GPU, or what the cores can bear."""
    if is_under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return torch.cuda.device_count() or most_ranks_here()


def plans_for(plan: Plan, ranks: int, *, exactly: bool) -> Iterator[Plan]:
    """The plan with the largest data degree for so many ranks, then smaller ones; `exactly`: for all of them.

    Where fewer replicas need more microbatches to keep to the rules of the plan, they get as many as keep the
    size of a microbatch.
    """
    if plan.pipeline == AUTO:
        return
    for data in range(plan.data, 0, -1):
        factor = -(-plan.data // data)
        for microbatches in dict.fromkeys((plan.microbatches, factor * plan.microbatches)):
            try:
                smaller = dataclasses.replace(plan, data=data, microbatches=microbatches)
            except UserError:
                continue
            if smaller.ranks == ranks or (smaller.ranks < ranks and not exactly):
                yield smaller


# keep='memory': copies that no rank will go on from become a checkpoint on disk, which any plan can load.


@final
class CopyRescue:
    """Saves copies in memory of a run whose ranks this process starts, while it has none."""

    def __init__(self, job: Job, run: Run, memory: RunMemory) -> None:
        self._job, self._run, self._memory = job, run, memory

    def before_start(self, fitted: Job) -> None:
        """Write copies that the ranks to come would not use: they have another plan, or another `keep`."""
        copies = self._newest()
        if copies is None:
            return
        if not is_in_memory(fitted) or Plan.parse(copies.plan) != Plan.parse(fitted.plan):
            self._write(copies)

    def at_end(self) -> None:
        """Write what there is; if that cannot be, the memory stays, and the reason is said."""
        try:
            copies = self._newest()
            if copies is not None:
                self._write(copies)
        except UserError as error:
            self._say(
                f"the copies in memory stay there for {DAYS_KEPT} days, because they cannot be written: "
                f"{error}; go on with --resume before that"
            )
        else:
            self._memory.stays = False

    def _newest(self) -> HostCopies | None:
        run = self._run.folder.path
        folder = folder_of(self._job, run)
        return None if folder is None else HostCopies.newest(folder, newest_step(self._job, run), self._say)

    def _write(self, copies: HostCopies) -> None:
        run = self._run.folder.path
        checkpoint_folder(self._job, run).save(copies, copies.step, copies.extra, wait=True)
        forget_all(MemoryFolder(run))
        self._say(f"step {copies.step}: the copy in memory is a checkpoint on disk now")

    def _say(self, text: str) -> None:
        with suppress(UserError):  # a full disk must not hide the error that ends the run
            self._run.take(Noted(text))


_LISTENS = "a rank handles SIGTERM from now on"  # the first message of each

Fit = Callable[[Job], Job]  # the job for the devices that there are now


def supervise(job: Job, run: Run, fit: Fit, sigterm: Sigterm) -> None:
    """Train to the end of the job; raises Preempted after SIGTERM, RankFailed after too many faults, or after
    SIGTERM: then it is not known whether ranks had saved."""
    path = run.folder.path
    with memory_of_run(job, path) as memory:
        rescue = CopyRescue(job, run, memory)
        try:
            last = _train_through_faults(job, run, fit, sigterm, rescue)
        except BaseException as error:
            memory.stays = True  # until it is on disk, whatever comes
            with suppress(OSError, UserError):  # and must not hide the error
                checkpoint_folder(job, path).remove_leftovers()
            rescue.at_end()
            if isinstance(error, RankFailed) and sigterm.came and not sigterm.is_forwarded:
                # Ranks that start do not handle it yet, and nothing is lost: they had not trained.
                sigterm.is_answered = True
                raise Preempted(newest_step(job, path)) from error
            if not sigterm.came or not run.logbook.has_started:
                raise
            note = _what_is_saved(fit(job), path)
            if isinstance(error, UserError):
                raise UserError(error.title, [*error.errors, note]) from error
            if isinstance(error, RankFailed):
                others = [*error.others, note]
                raise type(error)(error.rank, error.reason, error.traceback, others) from error
            error.add_note(note)
            raise
    if last is not None:
        sigterm.is_answered = True
        raise Preempted(last)


def _train_through_faults(job: Job, run: Run, fit: Fit, sigterm: Sigterm, rescue: CopyRescue) -> int | None:
    """Attempts until one comes to its end; what `_train` returns."""
    before, fitted = job, fit(job)
    faults = _Faults(fitted, run)
    rescue.before_start(fitted)
    while True:
        if fitted != before:
            run.take(Noted(change(job, fitted)))
        checkpoint_folder(job, run.folder.path).remove_leftovers()
        try:
            return _train(fitted, run, sigterm)
        except RankFailed as error:
            if sigterm.came:
                raise
            faults.add(error, fitted)
        before, fitted = fitted, fit(job)
        if fitted != before:
            rescue.before_start(fitted)


def _train(job: Job, run: Run, sigterm: Sigterm) -> int | None:
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


def _what_is_saved(job: Job, run: Path) -> str:
    """After a SIGTERM that was not answered by a save: what there is to go on from."""
    on_disk, in_memory = newest_step(job, run), newest_in_memory(job, run)
    last = f"the last checkpoint is step {on_disk}" if on_disk else "there is no checkpoint"
    kept = f", and step {in_memory} is in the memory of this machine" if in_memory > on_disk else ""
    return f"stopped by SIGTERM before saving; {last}{kept}; go on with: echelon train --resume {run}"


class _Faults:
    """Counts those since the last progress."""

    def __init__(self, job: Job, run: Run) -> None:
        self._job, self._run = job, run
        self._number, self._saved = 0, self._newest(job)

    def add(self, error: RankFailed, fitted: Job) -> None:
        """Tell of a fault; raises it again where it is one too many."""
        saved = self._newest(fitted)
        if saved > self._saved:
            self._number, self._saved = 0, saved
        self._number += 1
        if self._number > self._job.restarts:
            if self._job.restarts:
                restarts = counted(self._job.restarts, "restart")
                error.add_note(f"{restarts} since the last checkpoint did not help")
            raise error
        self._run.take(Restarting(f"rank {error.rank} {error.reason}", self._number, self._job.restarts))

    def _newest(self, job: Job) -> int:
        run = self._run.folder.path
        return max(newest_step(job, run), newest_in_memory(job, run))
