"""keep='memory': the folder of a run's copies in memory, from the start of the run to its end.

The process that starts the ranks owns it: this one, or the agent of torchrun on each host.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.engine import Engine
from echelon.engine.auto import ranks_here
from echelon.errors import UserError
from echelon.plan import Plan
from echelon.state.checkpoint.copies.folder import MemoryFolder, newest_step_here, remove_dead_folders
from echelon.state.checkpoint.copies.keeper import MemoryCopies
from echelon.state.checkpoint.manifest import OtherVersionError
from echelon.train.jobs.job import Job
from echelon.train.runs import Preempted
from echelon.train.runs.run_folder import is_unfinished

MEMORY = "memory"
NUM_ON_DISK = 2  # checkpoints that stay on disk beside the copies in memory


def is_in_memory(job: Job) -> bool:
    return job.keep == MEMORY


def open_copies(job: Job, run: Path, engine: Engine) -> MemoryCopies | None:
    """The copies of a run, if its job asks for them; all ranks must call this."""
    if not is_in_memory(job):
        return None
    return MemoryCopies(MemoryFolder(run), str(engine.plan), engine.mesh.group("all"), engine.mesh.device)


def folder_of(job: Job, run: Path) -> MemoryFolder | None:
    """Return the folder of a run's copies, also of those before another `keep`; None without a RAM disk."""
    try:
        return MemoryFolder(run)
    except UserError:
        if is_in_memory(job):
            raise
        return None


def has_copies(job: Job, run: Path) -> bool:
    folder = folder_of(job, run)
    return folder is not None and bool(folder.entries())


def newest_in_memory(job: Job, run: Path) -> int:
    return newest_step_here(MemoryFolder(run), ranks_here(Plan.parse(job.plan))) if is_in_memory(job) else 0


def loss_warning(job: Job) -> str:
    """Return a warning for torchrun: no process writes copies to disk after the last restart."""
    if not is_in_memory(job) or job.keep_every > 0:
        return ""
    return (
        "keep='memory' keep_every=0: nothing is on disk before the end of the run, so that all is lost if "
        "torchrun uses up its --max-restarts; set keep_every, for a checkpoint on disk every so many steps"
    )


class RunMemory:
    """The folder of a run in memory, which `stays` at the end of the run for --resume."""

    stays = False


@contextmanager
def memory_of_run(job: Job, run: Path) -> Iterator[RunMemory]:
    """Make the folder of a run whose ranks this process starts, and remove it at the end, unless it stays."""
    folder, memory = _make(job, run, os.getpid()), RunMemory()
    try:
        yield memory
    finally:
        if folder is not None and not memory.stays:
            folder.remove()


@contextmanager
def memory_of_rank(job: Job, run: Path) -> Iterator[None]:
    """The same in a rank of torchrun, which may start it again: then the folder stays."""
    folder = _make(job, run, os.getppid())
    attempts = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    restarts, most = (int(text) if text.isdecimal() else 0 for text in attempts)
    stays = False
    try:
        yield
    except BaseException as error:
        ends = isinstance(error, Preempted | KeyboardInterrupt) or restarts >= most
        stays = not ends or isinstance(error, OtherVersionError)
        raise
    finally:
        if folder is not None and not stays:
            folder.remove()


def _make(job: Job, run: Path, owner: int) -> MemoryFolder | None:
    """Also removes what other runs have left that no process will go on with."""
    folder = folder_of(job, run)
    if folder is None:
        return None
    remove_dead_folders(is_unfinished, keep=folder.path)
    if not is_in_memory(job) and not folder.path.exists():
        return None
    folder.make(owner)
    return folder
