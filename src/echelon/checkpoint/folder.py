"""The checkpoints of a run, in one folder.

checkpoints/
    step-00000100/
    step-00000200/
    latest              the name of the newest whole one: step-00000200
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

import torch.distributed as dist

from echelon.checkpoint.opening import open_whole
from echelon.checkpoint.storage import storage_at
from echelon.checkpoint.storage_errors import RETRIES, with_retries
from echelon.errors import UserError
from echelon.launching.group import decide_on_rank_0

LATEST = "latest"
_PREFIX = "step-"
_NAME = re.compile(rf"{_PREFIX}(\d{{8,18}})", re.ASCII)


class Saves(Protocol):
    """An engine, as far as this needs it."""

    def save(
        self,
        path: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        then: Callable[[], None] | None = None,
        retries: int = RETRIES,
    ) -> None: ...

    def load(self, path: str | Path, *, verify: bool = True) -> dict[str, Any]: ...


@final
class CheckpointFolder:
    """Saves and loads the checkpoints of a run; all ranks call the same.

    The last `keep` are kept, and of the older ones every one whose step is divisible by `keep_every`.
    """

    def __init__(
        self, path: str | Path, *, keep: int = 2, keep_every: int = 0, retries: int = RETRIES
    ) -> None:
        """`path`: a folder, or a URL. `retries`: how often a write is tried again after an error that may
        pass."""
        if keep < 1 or keep_every < 0:
            raise UserError(
                f"keep={keep} keep_every={keep_every}: keep must be at least 1, so that there is always a "
                "checkpoint, and keep_every at least 0"
            )
        self.path, self._keep, self._keep_every, self._retries = path, keep, keep_every, retries
        self._storage = storage_at(path)

    def save(self, engine: Saves, step: int, extra: Mapping[str, Any], *, wait: bool = False) -> None:
        """Save after `step`. Without `wait` this returns when the state is copied; an error of the writing is
        raised by the next save, or by engine.finish_saving()."""
        then = partial(self._is_saved, step)
        engine.save(self.path_of(step), extra=extra, wait=wait, then=then, retries=self._retries)

    def load_last(
        self, engine: Saves, say: Callable[[str], None] = print, *, after: int = -1
    ) -> dict[str, Any] | None:
        """Load the newest checkpoint that is whole, and return its extra; None if there is none after step
        `after`.

        Damaged ones are named to `say`, and passed over.
        """
        for step in (step for step in self._steps_of_all() if step > after):
            try:
                open_whole(self.path_of(step))
            except UserError as error:
                say(f"{error}; trying the one before")
                continue
            return engine.load(self.path_of(step), verify=False)
        return None

    def remove_leftovers(self) -> None:
        """Remove temporary files of a job that was killed; on one rank, where no other job saves here."""
        self._storage.remove_leftovers(LATEST)

    def discard_from(self, step: int) -> None:
        """Remove those of `step` and later, newest first; on one rank, while nothing is saved."""
        steps = self.steps()
        for late in (each for each in steps if each >= step):
            self._storage.remove(_name(late))
        left = [each for each in steps if each < step]
        if left:
            with_retries(lambda: self._storage.write(LATEST, _name(left[0]).encode()), self._retries)

    def steps(self) -> list[int]:
        """Those with a final name, newest first."""
        found = [_NAME.fullmatch(name) for name in self._storage.names()]
        return sorted((int(match[1]) for match in found if match is not None), reverse=True)

    def _steps_of_all(self) -> list[int]:
        """As rank 0 sees them, on every rank."""
        return list(decide_on_rank_0(self.steps)) if dist.is_initialized() else self.steps()

    def path_of(self, step: int) -> str | Path:
        return self._storage.at(_name(step))

    def _is_saved(self, step: int) -> None:
        """On rank 0, when a checkpoint is whole: it is the latest, and old ones go."""
        with_retries(lambda: self._storage.write(LATEST, _name(step).encode()), self._retries)
        for old in removed(self.steps(), step, self._keep, self._keep_every):
            self._storage.remove(_name(old))


def _name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def removed(steps: Sequence[int], saved: int, keep: int, keep_every: int) -> list[int]:
    """Which of the checkpoints go when that of step `saved` is whole.

    removed([50, 40, 30, 20, 10], 50, keep=2, keep_every=20) == [30, 10]

    Those of later steps go too: training went back before them, because they are damaged, or led nowhere.
    """
    later = [step for step in steps if step > saved]
    older = sorted((step for step in steps if step <= saved), reverse=True)
    return [*later, *(step for step in older[keep:] if not keep_every or step % keep_every)]
