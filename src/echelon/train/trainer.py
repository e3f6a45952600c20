"""A whole training run: the folder, the ranks, the events that are shown and kept, and the end."""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echelon import __version__
from echelon.engine.auto import ranks_here
from echelon.errors import UserError
from echelon.launching import TRAINING_MODULES, Ranks, is_launched_rank, join, preload, send_message
from echelon.launching.torchrun import is_under_torchrun, when_ended
from echelon.plan import Plan
from echelon.train.events import Event, Starting
from echelon.train.job import Job, as_plain, check
from echelon.train.logbook import Logbook
from echelon.train.loop import train_rank
from echelon.train.run_folder import RunFolder

Show = Callable[[Event], None]


def train(job: Job, show: Show) -> dict[str, Any]:
    """Run `job` on the ranks of its plan and return the summary; `show` is called with every event.

    Starts the ranks on this machine; under torchrun this process is one of them already.
    """
    check(job)
    return _train_among_peers(job, show) if is_under_torchrun() else _train_here(job, show)


def _train_here(job: Job, show: Show) -> dict[str, Any]:
    preload(*TRAINING_MODULES, __name__)
    with _run(job, show) as run:
        with Ranks(ranks_here(Plan.parse(job.plan))) as ranks:
            ranks.run(_rank, job, run.folder.path, on_message=lambda _, event: run.take(event))
        return run.finish()


def _train_among_peers(job: Job, show: Show) -> dict[str, Any]:
    """Under torchrun rank 0 keeps the logbook; the others only train."""
    join()
    if dist.get_rank() != 0:
        train_rank(job, Path(), show)
        return {}
    with _run(job, show) as run:
        when_ended(run.folder.fail)
        train_rank(job, run.folder.path, run.take)
        return run.finish()


def _rank(job: Job, folder: Path) -> None:
    assert is_launched_rank()
    train_rank(job, folder, send_message)


@dataclass(frozen=True)
class _Run:
    """A run folder, its logbook, and a function that shows events."""

    folder: RunFolder
    logbook: Logbook
    show: Show

    def take(self, event: Event) -> None:
        self.logbook.take(event)
        self.show(event)

    def finish(self) -> dict[str, Any]:
        self.logbook.close()
        summary = {"run": str(self.folder.path), **self.logbook.summary()}
        self.folder.mark("finished", {"summary": summary})
        return summary

    def break_off(self, error: BaseException) -> None:
        """Keep what there is of a run that `error` ends; nothing, if the user's mistake let none begin."""
        if isinstance(error, UserError) and not self.logbook.has_started:
            self.folder.discard()
            return
        with suppress(UserError):  # a full disk must not hide the error
            self.logbook.close()
        self.folder.fail(f"{type(error).__name__}: {error}")
        error.add_note(f"step {self.logbook.last_step} was the last; the run is in {self.folder.path}")


@contextmanager
def _run(job: Job, show: Show) -> Iterator[_Run]:
    """A new run. If anything is raised inside, it is marked as failed, or removed if it never began."""
    folder = RunFolder.create(Path(job.out), job.name, _about(job))
    try:
        run = _Run(folder, Logbook(folder), show)
    except BaseException:
        folder.discard()
        raise
    try:
        run.take(Starting(str(folder.path)))
        yield run
    except BaseException as error:
        run.break_off(error)
        raise


def _about(job: Job) -> dict[str, Any]:
    """What run.json says from the start of a run."""
    versions = {"echelon": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"job": as_plain(job), "plan": job.plan, "versions": versions, "pid": os.getpid()}
