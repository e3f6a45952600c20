"""The checkpoints of a run: when they are saved, and what they say of the place in the data.

runs/train-20261115-020304/checkpoints/
    step-00000100/   step-00000200/   latest

With keep='memory' there are copies in memory too, in a folder from the start of the run to its end. The
process that starts the ranks owns it: this one, or the agent of torchrun on each host.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast, final

import torch.distributed as dist

from echelon.collectives.agreement import decide_on_rank_0
from echelon.engine import Engine
from echelon.engine.auto import ranks_here
from echelon.errors import UserError
from echelon.plan import Plan
from echelon.state.checkpoint.copies.folder import MemoryFolder, newest_step_here, remove_dead_folders
from echelon.state.checkpoint.copies.keeper import MemoryCopies
from echelon.state.checkpoint.folder import CheckpointFolder
from echelon.state.checkpoint.manifest import OtherVersionError
from echelon.train.events import FROM_DISK, METRICS, Evaluated, Event, RolledBack, Stepped, line_of, step_of
from echelon.train.jobs.job import Job
from echelon.train.runs import Preempted
from echelon.train.runs.rollbacks import SKIPPED, DataPosition, SkippedBatches, SpikeWatch, Trouble
from echelon.train.runs.run_folder import RunFolder, is_unfinished
from echelon.update.nonfinite import NonfiniteError

CHECKPOINTS = "checkpoints"
T = TypeVar("T")


@final
class Checkpoints:
    """Saves and loads the state of an engine in the folder of its run; all ranks call the same."""

    def __init__(self, job: Job, run: Path, engine: Engine, say: Callable[[str], None]) -> None:
        """`say` takes what a person should know, on every rank."""
        self._job, self._engine, self._say = job, engine, say
        self._folder = checkpoint_folder(job, run)
        self._run, self._skipped = RunFolder(run), SkippedBatches()
        self.spikes = SpikeWatch(job.spike_factor, job.spike_window)
        self.unwritten = UnwrittenLines(run / METRICS)
        self._memory: MemoryCopies | None = None
        if is_in_memory(job):
            group, device = engine.mesh.group("all"), engine.mesh.device
            self._memory = MemoryCopies(MemoryFolder(run), str(engine.plan), group, device)
        self._last_on_disk = self._last_in_memory = 0
        self.source = FROM_DISK  # of the state that was loaded last

    def limit(self, job: Job) -> None:
        self._job = job

    def check_room(self, rank_bytes: float) -> None:
        """Refuse copies in memory for which there is no room: states of so many bytes at least."""
        if self._memory is not None:
            self._memory.check_room(rank_bytes)

    def load_last(self, *, before: float = math.inf) -> int:
        """Go on from the newest whole checkpoint from before a step, on disk or in memory: its step, or 0."""
        skipped = decide(lambda: SkippedBatches.read(self._run.path / SKIPPED).plain())
        self._skipped = SkippedBatches.parse(skipped)
        extra = self._load_newest(before)
        if self._engine.mesh.rank == 0:
            self.unwritten.restore(None if extra is None else extra.get("lines"))
        if extra is None:
            return 0
        step = _step_of(extra)
        position = DataPosition.parse(extra).with_others(step, self._skipped.skipped)
        self._skipped = self._skipped._replace(skipped=position.skipped)
        self.spikes.restore(extra.get("losses"))
        return step

    def _load_newest(self, before: float) -> dict[str, Any] | None:
        found = None if self._memory is None else self._memory.find(self._say, before=before)
        after = -1 if found is None else found.step
        extra = self._folder.load_last(self._engine, self._say, after=after, before=before)
        if extra is not None:
            found, self._last_on_disk, self.source = None, _step_of(extra), FROM_DISK
        elif found is not None:
            extra = self._engine.load_saved(found.saved)
            self._last_in_memory = found.step
            lost = ", ".join(map(str, found.received))  # ranks that had no file of their own any more
            ranks = f", rank{'s' if len(found.received) > 1 else ''} {lost} from the copy on another host"
            self.source = "from memory" + (ranks if lost else "")
        if self._memory is not None:
            self._memory.keep_only(found)
        return extra

    def batch_of(self, step: int) -> int:
        """The number of the batch that `step`, from 1, trains."""
        return self._position(step - 1).next_batch

    def _position(self, steps: int) -> DataPosition:
        return DataPosition.after_steps(steps, self._skipped.skipped)

    @property
    def num_rollbacks(self) -> int:
        return self._skipped.rollbacks

    @property
    def rollbacks(self) -> tuple[RolledBack, ...]:
        return self._skipped.events

    def can_roll_back(self, step: int) -> bool:
        """Return whether there is a checkpoint from before `step`; all ranks must ask."""
        self.finish()
        in_memory = [] if self._memory is None else self._memory.steps()
        return any(saved < step for saved in [*decide(self._folder.steps), *in_memory])

    def roll_back(self, trouble: Trouble) -> RolledBack:
        """Load the newest whole checkpoint from before the trouble, and leave out the batches from there up
        to that of its last step, from now on."""
        first, end = trouble.first, self.batch_of(trouble.last) + 1
        with suppress(NonfiniteError):  # of steps that are undone
            self._engine.synchronize()
        self._last_on_disk = self._last_in_memory = 0
        step = self.load_last(before=first)
        if step == 0:
            raise UserError(
                f"no checkpoint from before step {first} is whole, so that training cannot go back"
            )
        decide(lambda: self._folder.discard_from(first))
        begin, number = self.batch_of(step + 1), self._skipped.rollbacks + 1
        event = RolledBack(step, trouble.last, trouble.reason, begin, end, number, self._job.max_rollbacks)
        skipped = self._position(step).skip(begin, end).skipped
        self._skipped = SkippedBatches(number, skipped, (*self._skipped.events, event))
        decide(lambda: str(self._run.write(SKIPPED, self._skipped.text(), sync=True)))
        return event

    def is_due(self, step: int) -> bool:
        return step == self._job.steps or (self._job.save_every > 0 and step % self._job.save_every == 0)

    def save(self, step: int, *, wait: bool = False) -> None:
        """Save the state after `step`, unless that is done. With `wait` it is on disk when this returns."""
        extra = {
            "step": step,
            **self._position(step).as_plain(),
            "losses": self.spikes.as_plain(),
            "lines": self.unwritten.as_plain(),
        }
        is_last = wait or step == self._job.steps
        if self._memory is not None and not is_last and step > self._last_in_memory:
            self._memory.save(step, *self._engine.saved_state(extra))
            self._last_in_memory = step
        every = self._job.keep_every
        goes_to_disk = is_last or self._memory is None or (every > 0 and step % every == 0)
        if step > self._last_on_disk and goes_to_disk:
            # Between steps no one else changes weights here.
            self._folder.save(self._engine, step, extra, wait=wait, copy_behind=not wait)
            self._last_on_disk = step
        if wait:
            self.finish()

    def finish(self) -> None:
        """Return when nothing is being saved; raises what went wrong. All ranks must call this."""
        self._engine.finish_saving()
        if self._memory is not None:
            self._memory.finish()


def checkpoint_folder(job: Job, run: Path) -> CheckpointFolder:
    if is_in_memory(job):
        return CheckpointFolder(run / CHECKPOINTS, keep=NUM_ON_DISK)
    return CheckpointFolder(run / CHECKPOINTS, keep=int(job.keep), keep_every=job.keep_every)


def newest_step(job: Job, run: Path) -> int:
    """The step of the newest checkpoint of a run on disk, or 0."""
    return max(checkpoint_folder(job, run).steps(), default=0)


def decide(find: Callable[[], T]) -> T:
    """Return on every rank what rank 0 finds, as JSON."""
    return cast(T, decide_on_rank_0(find)) if dist.is_initialized() else find()


def _step_of(extra: dict[str, Any]) -> int:
    step = extra.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UserError(f"the checkpoint is of step {step!r}, which is no number of steps of a training run")
    return step


# Lines of metrics.jsonl that are on their way: a checkpoint has those that are not in the file yet.

_MANY = 1000  # lines: more wait only if the parent does not ask for them, because its pipe holds less
_OTHER_LINES = 1 << 14  # bytes that rollbacks may take between them


@final
class UnwrittenLines:
    """On rank 0: what it told, as far as `path` does not have it."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, list[str]()

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def add(self, event: Event) -> None:
        if isinstance(event, Stepped | Evaluated):
            self._lines.append(line_of(event))
            if len(self._lines) % _MANY == 0:
                self._forget_written()

    def as_plain(self) -> list[str]:
        self._forget_written()
        return list(self._lines)

    def restore(self, value: Any) -> None:
        """Read what `as_plain` has made; what cannot be read is left out."""
        lines = value if isinstance(value, list) else []
        self._lines = [line for line in lines if isinstance(line, str) and step_of(line) is not None]

    def _forget_written(self) -> None:
        """Keep the lines from the first step on that has one to write: the parent writes them in order."""
        size, lines = sum(len(line) + 1 for line in self._lines) + _OTHER_LINES, self._lines
        written: set[str] = set()
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - size))
            written = set(file.read().decode(errors="replace").splitlines())
        first = max((index + 1 for index, line in enumerate(lines) if line in written), default=0)
        while 0 < first < len(lines) and step_of(lines[first - 1]) == step_of(lines[first]):
            first -= 1
        self._lines = lines[first:]


NUM_ON_DISK = 2  # checkpoints that stay on disk beside the copies in memory


def is_in_memory(job: Job) -> bool:
    return job.keep == "memory"


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
