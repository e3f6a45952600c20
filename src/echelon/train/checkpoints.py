"""The checkpoints of a run: when they are saved, and what they say of the place in the data.

runs/train-20261115-020304/checkpoints/
    step-00000100/   step-00000200/   latest
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from echelon.checkpoint import CheckpointFolder
from echelon.engine import Engine
from echelon.train.job import Job

CHECKPOINTS = "checkpoints"


@final
class Checkpoints:
    """Saves and loads the state of an engine in the folder of its run; all ranks call the same."""

    def __init__(self, job: Job, run: Path, engine: Engine, say: Callable[[str], None]) -> None:
        """`say` takes what a person should know, on every rank."""
        self._job, self._engine, self._say = job, engine, say
        self._folder = checkpoint_folder(job, run)
        self._last_saved = 0

    def load_last(self) -> int:
        """Go on from the newest whole checkpoint: returns its step, or 0 without one."""
        extra = self._folder.load_last(self._engine, self._say)
        if extra is not None:
            self._last_saved = _step_of(extra)
        return self._last_saved

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is saved."""
        return step == self._job.steps or (self._job.save_every > 0 and step % self._job.save_every == 0)

    def save(self, step: int, *, wait: bool = False) -> None:
        """Save the state after `step`, unless that is done. Without `wait`, while training goes on."""
        if step > self._last_saved:
            self._folder.save(self._engine, step, {"next_batch": step}, wait=wait)
            self._last_saved = step
        if wait:
            self._engine.finish_saving()


def checkpoint_folder(job: Job, run: Path) -> CheckpointFolder:
    return CheckpointFolder(run / CHECKPOINTS, keep=job.keep, keep_every=job.keep_every)


def newest_step(job: Job, run: Path) -> int:
    """The step of the newest checkpoint of a run, or 0."""
    return max(checkpoint_folder(job, run).steps(), default=0)


def _step_of(extra: dict[str, Any]) -> int:
    return int(extra["next_batch"])
