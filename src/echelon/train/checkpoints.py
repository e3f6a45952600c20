"""The checkpoints of a run: when they are saved, and what they say of the place in the data.

runs/train-20261115-020304/checkpoints/
    step-00000100/   step-00000200/   latest
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast, final

import torch.distributed as dist

from echelon.checkpoint import CheckpointFolder
from echelon.engine import Engine
from echelon.engine.nonfinite import NonfiniteError
from echelon.errors import UserError
from echelon.launching.group import decide_on_rank_0
from echelon.train.data_position import DataPosition
from echelon.train.job import Job
from echelon.train.rollbacks import SKIPPED, Return, SkippedBatches
from echelon.train.run_folder import RunFolder
from echelon.train.spikes import SpikeWatch

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
        self._last_saved = 0

    def load_last(self) -> int:
        """Go on from the newest whole checkpoint: returns its step, or 0 without one."""
        self._skipped = SkippedBatches.parse(
            decide(lambda: SkippedBatches.read(self._run.path / SKIPPED).plain())
        )
        extra = self._folder.load_last(self._engine, self._say)
        if extra is not None:
            self._last_saved = _step_of(extra)
            self.spikes.restore(extra.get("losses"))
        return self._last_saved

    def batch_of(self, step: int) -> int:
        """The number of the batch that `step`, from 1, trains."""
        return self._position(step - 1).next_batch

    def _position(self, steps: int) -> DataPosition:
        return DataPosition.after_steps(steps, self._skipped.skipped)

    # Rollbacks.

    @property
    def num_rollbacks(self) -> int:
        return self._skipped.rollbacks

    def can_go_back(self, step: int) -> bool:
        """Whether there is a checkpoint from before `step`; all ranks must ask."""
        self._engine.finish_saving()
        return any(saved < step for saved in decide(self._folder.steps))

    def go_back(self, first: int, last: int) -> Return:
        """Load the newest whole checkpoint from before step `first`, and leave out the batches from there up
        to that of step `last`, from now on."""
        end = self.batch_of(last) + 1
        decide(lambda: self._folder.discard_from(first))
        with suppress(NonfiniteError):  # of steps that are undone
            self._engine.synchronize()
        self._last_saved = 0
        step = self.load_last()
        if step == 0:
            raise UserError(
                f"no checkpoint from before step {first} is whole, so that training cannot go back"
            )
        batches = (self.batch_of(step + 1), end)
        skipped = self._position(step).skip(*batches).skipped
        self._skipped = SkippedBatches(self._skipped.rollbacks + 1, skipped)
        decide(lambda: str(self._run.write(SKIPPED, self._skipped.text())))
        return Return(step, batches)

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is saved."""
        return step == self._job.steps or (self._job.save_every > 0 and step % self._job.save_every == 0)

    def save(self, step: int, *, wait: bool = False) -> None:
        """Save the state after `step`, unless that is done. Without `wait`, while training goes on."""
        if step > self._last_saved:
            extra = {"step": step, **self._position(step).as_plain(), "losses": self.spikes.as_plain()}
            self._folder.save(self._engine, step, extra, wait=wait)
            self._last_saved = step
        if wait:
            self._engine.finish_saving()


def checkpoint_folder(job: Job, run: Path) -> CheckpointFolder:
    return CheckpointFolder(run / CHECKPOINTS, keep=job.keep, keep_every=job.keep_every)


def newest_step(job: Job, run: Path) -> int:
    """The step of the newest checkpoint of a run, or 0."""
    return max(checkpoint_folder(job, run).steps(), default=0)


def decide(find: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank, as JSON."""
    return cast(T, decide_on_rank_0(find)) if dist.is_initialized() else find()


def _step_of(extra: dict[str, Any]) -> int:
    step = extra.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UserError(f"the checkpoint is of step {step!r}, which is no number of steps of a training run")
    return step
