"""A run while it is trained: its folder, its logbook, and a function that shows events."""

import fcntl
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon import __version__
from echelon.errors import UserError
from echelon.launching import host_work
from echelon.train.events import Event, Noted, Restarting, RolledBack, Starting
from echelon.train.jobs.job import Job, as_plain
from echelon.train.logbook import Logbook
from echelon.train.runs.preempted import Preempted
from echelon.train.runs.run_folder import FINISHED, PREEMPTED, RunFolder, explain_os_errors

Show = Callable[[Event], None]


@dataclass(frozen=True)
class Run:
    """Keeps and shows what happens; `finish` it, or the error that leaves `open_run` ends it."""

    folder: RunFolder
    logbook: Logbook
    show: Show
    is_new: bool

    def take(self, event: Event) -> None:
        self.logbook.take(event)
        match event:
            case Restarting(reason, number):
                self.folder.note("restart", reason=reason, number=number, after_step=self.logbook.last_step)
            case RolledBack(step, from_step, reason):
                self.folder.note("rollback", step=step, from_step=from_step, reason=reason)
            case Noted(text):
                self.folder.note("note", text=text)
        self.show(event)

    def finish(self) -> dict[str, Any]:
        with host_work("the picture of the loss"):  # rank 0 of torchrun, for which others may wait
            self.logbook.close()
        summary = {"run": str(self.folder.path), **self.logbook.summary()}
        self.folder.mark(FINISHED, {"summary": summary})
        return summary

    def break_off(self, error: BaseException) -> None:
        """Keep what there is of a run that `error` ends; nothing, if the user's mistake let none begin."""
        if isinstance(error, UserError) and self.is_new and not self.logbook.has_started:
            self.folder.discard()
            return
        with suppress(UserError):  # a full disk must not hide the error
            self.logbook.close()
        if isinstance(error, Preempted):
            with suppress(UserError):
                self.folder.mark(PREEMPTED, {"reason": str(error)})
            saved = f"step {error.step} was the last, and is saved" if error.step else "no step was made"
            error.add_note(f"{saved}; go on with: echelon train --resume {self.folder.path}")
            return
        self.folder.fail(f"{type(error).__name__}: {error}")
        last = self.logbook.last_step
        done = f"step {last} was the last" if last else "no step was made"
        error.add_note(f"{done}; the run is in {self.folder.path}")


@contextmanager
def open_run(job: Job, show: Show, path: Path | None = None, launch: Sequence[str] = ()) -> Iterator[Run]:
    """A new run, or that in `path`. If anything is raised inside, it is marked as failed or preempted, or
    removed if it never began. `launch` names the processes that started the ranks, if that is torchrun.
    """
    versions = {"echelon": __version__, "torch": torch.__version__, "python": platform.python_version()}
    about = {"job": as_plain(job), "plan": job.plan, "versions": versions, "pid": os.getpid()}
    if launch:
        about["launch"] = list(launch)
    folder = RunFolder.create(Path(job.out), job.name, about) if path is None else RunFolder(path)
    with locked(folder.path):
        if path is not None:
            folder.mark("running", about)
            folder.note("resume")
        try:
            run = Run(folder, Logbook(folder), show, is_new=path is None)
        except BaseException:
            if path is None:
                folder.discard()
            raise
        try:
            run.take(Starting(str(folder.path)))
            yield run
        except BaseException as error:
            run.break_off(error)
            raise


# One process at a time trains in a run folder: a lock that the system releases when the process ends.

_LOCK = ".lock"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the lock of a run folder; a UserError if another process holds it."""
    path = run / _LOCK
    with explain_os_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"the run in {run} is still being trained, by another process; wait for its end, or end it"
            ) from None
        yield
    finally:
        os.close(descriptor)
