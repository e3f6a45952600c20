"""keep='memory': copies that no rank will go on from become a checkpoint on disk, which any plan can load.

So it is when a run ends by faults, by Ctrl-C or by an error, and when ranks start again with another plan, or
with another `keep`.
"""

from contextlib import suppress
from typing import final

from echelon.errors import UserError
from echelon.plan import Plan
from echelon.state.checkpoint.copies import DAYS_KEPT, HostCopies, MemoryFolder, forget_all
from echelon.train.checkpoints import checkpoint_folder, newest_step
from echelon.train.events import Noted
from echelon.train.jobs.job import Job
from echelon.train.run import Run
from echelon.train.runs.memory_copies import RunMemory, folder_of, is_in_memory


@final
class CopyRescue:
    """Of a run whose ranks this process starts, while it has none."""

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
        """The copies in memory that are newer than all checkpoints on disk."""
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
