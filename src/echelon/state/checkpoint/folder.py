"""The checkpoints of a run, in one folder.

checkpoints/
    step-00000100/
    step-00000200/
    latest              the name of the newest whole one: step-00000200

`find_checkpoint` finds the one that a path means: a folder itself, or the newest of a folder or of a run.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from echelon.collectives.agreement import decide_on_rank_0
from echelon.errors import DamagedError, UserError
from echelon.state.checkpoint.manifest import MANIFEST
from echelon.state.checkpoint.saved import SavedState, open_whole
from echelon.state.checkpoint.storage import storage_at
from echelon.state.checkpoint.storage_errors import RETRIES, with_retries

LATEST = "latest"
RUN_FILE, CHECKPOINTS = "run.json", "checkpoints"
_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}(\d{{8,18}})", re.ASCII)


@final
class CheckpointFolder:
    """Saves and loads the checkpoints of a run; all ranks call the same.

    The last `keep` are kept, and of the older ones every one whose step is divisible by `keep_every`.
    """

    def __init__(
        self, path: str | Path, *, keep: int = 2, keep_every: int = 0, retries: int = RETRIES
    ) -> None:
        """`path`: a folder, or a URL. `retries`: of a write, after an error that may pass."""
        if keep < 1 or keep_every < 0:
            raise UserError(
                f"keep={keep} keep_every={keep_every}: keep must be at least 1, so that there is always a "
                "checkpoint, and keep_every at least 0"
            )
        self.path, self._keep, self._keep_every, self._retries = path, keep, keep_every, retries
        self._storage = storage_at(path)
        self._passed_over: set[int] = set()  # damaged, and later than the one that was loaded

    def save(
        self,
        engine: Any,
        step: int,
        extra: Mapping[str, Any],
        *,
        wait: bool = False,
        copy_behind: bool = False,
    ) -> None:
        """Save an engine (or `HostCopies`) after `step`. Without `wait` it is written behind the next steps,
        and an error is raised by the next save, or by engine.finish_saving()."""
        behind = {"wait": wait, "copy_behind": copy_behind}
        then = partial(self._is_saved, step)
        engine.save(self.path_of(step), extra=extra, then=then, retries=self._retries, **behind)

    def load_last(
        self, engine: Any, say: Callable[[str], None] = print, *, after: int = -1, before: float = math.inf
    ) -> dict[str, Any] | None:
        """Load the newest checkpoint that is whole, and return its extra; None if there is none between the
        steps `after` and `before`.

        Damaged ones are named to `say`, and passed over. Not so one that cannot be read, or is of another
        version: it may be whole. If all are damaged it is an error, unless there is a state of step `after`.
        """
        damaged: dict[int, str] = {}
        found = decide_on_rank_0(self.steps) if dist.is_initialized() else self.steps()
        steps = [step for step in found if after < step < before]
        for step in steps:
            try:
                saved = open_whole(self.path_of(step))
            except DamagedError as error:
                damaged[step] = str(error)
                say(f"{error}; {_what_next(step, steps, after)}")
            except UserError as error:
                fix = f"it may be whole; if it is not, remove {self.path_of(step)} to go on without it"
                raise UserError(error.title, [*error.errors, fix]) from error
            else:
                extra: dict[str, Any] = engine.load_saved(saved)
                self._passed_over |= damaged.keys()
                return extra
        if damaged and after < 0:
            raise UserError(
                f"{self.path}: no checkpoint is whole; to train from the start, remove them:",
                damaged.values(),
            )
        self._passed_over |= damaged.keys()
        return None

    def remove_leftovers(self) -> None:
        """Remove temporary files of a job that was killed; on one rank, where no other job saves here."""
        self._storage.remove_leftovers(LATEST)

    def discard_from(self, step: int) -> None:
        """Remove those of `step` and later, newest first; on one rank, while nothing is saved."""
        steps = self.steps()
        self._passed_over = {each for each in self._passed_over if each < step}
        for late in (each for each in steps if each >= step):
            self._storage.remove(_name(late))
        left = [each for each in steps if each < step]
        if left:
            with_retries(lambda: self._storage.write(LATEST, _name(left[0]).encode()), self._retries)

    def steps(self) -> list[int]:
        """List the steps of checkpoints with a final name, newest first."""
        steps = map(step_of, self._storage.names())
        return sorted((step for step in steps if step is not None), reverse=True)

    def path_of(self, step: int) -> str | Path:
        return self._storage.at(_name(step))

    def _is_saved(self, step: int) -> None:
        """Name a whole checkpoint as the latest, and remove old ones; on rank 0."""
        with_retries(lambda: self._storage.write(LATEST, _name(step).encode()), self._retries)
        self._passed_over.discard(step)
        for old in removed(self.steps(), step, self._keep, self._keep_every, self._passed_over):
            self._storage.remove(_name(old))
        self._passed_over.clear()


def _what_next(step: int, steps: Sequence[int], after: int) -> str:
    """Say what is tried after the damaged checkpoint of a step; `steps`: newest first."""
    if step != steps[-1]:
        return "trying the one before"
    return "there is none before it" if after < 0 else f"there is none between it and step {after}"


def _name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint that a folder of this name is; None for another name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def removed(
    steps: Sequence[int], saved: int, keep: int, keep_every: int, damaged: Collection[int] = ()
) -> list[int]:
    """List the checkpoints that go when that of step `saved` is whole.

    removed([50, 40, 30, 20, 10], 50, keep=2, keep_every=20) == [30, 10]

    Those that are known to be damaged go too. Others of later steps stay: the user has not asked to go back.
    """
    older = sorted((step for step in steps if step <= saved and step not in damaged), reverse=True)
    useless = [step for step in steps if step in damaged]
    return [*useless, *(step for step in older[keep:] if not keep_every or step % keep_every)]


def find_checkpoint(path: Path) -> Path:
    """Find the checkpoint at a path; it may be damaged."""
    if path.is_file():
        raise UserError(f"{path}: is a file; give the folder of a checkpoint or of a run")
    if (path / MANIFEST).exists() or (path.is_dir() and step_of(path.name) is not None):
        return path
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = CheckpointFolder(folder).steps()
    if steps:
        return Path(CheckpointFolder(folder).path_of(steps[0]))
    kind = "there is no such folder" if not path.is_dir() else "holds no checkpoint"
    raise UserError(
        f"{path}: {kind}; give a checkpoint (with a {MANIFEST}), a folder of them (step-…), or a run that "
        "saved some"
    )


@contextmanager
def one_before_is_named(checkpoint: Path) -> Iterator[None]:
    """Add the name of the checkpoint before this one, if there is one, to an error that this is damaged."""
    try:
        yield
    except DamagedError as error:
        before = _one_before(checkpoint)
        fix = [] if before is None else [f"give the one before it: {before}"]
        raise DamagedError(error.title, [*error.errors, *fix]) from error


def _one_before(checkpoint: Path) -> Path | None:
    """Find the newest of an earlier step whose manifest and sizes are right; hashes would take long."""
    step = step_of(checkpoint.name)
    if step is None:
        return None
    folder = CheckpointFolder(checkpoint.parent)
    for earlier in (each for each in folder.steps() if each < step):
        with suppress(UserError):
            return SavedState.open(folder.path_of(earlier)).path
    return None


def find_run(path: Path) -> Path | None:
    path = path.absolute()
    places = (path, path.parent, path.parent.parent)
    return next((place for place in places if (place / RUN_FILE).is_file()), None)
