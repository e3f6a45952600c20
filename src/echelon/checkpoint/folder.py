"""The checkpoints of a run, in one folder.

checkpoints/
    step-00000100/
    step-00000200/
    latest              the name of the newest whole one: step-00000200
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, final

import torch.distributed as dist

from echelon.checkpoint.opening import open_whole
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
    ) -> None: ...

    def load(self, path: str | Path, *, verify: bool = True) -> dict[str, Any]: ...


@final
class CheckpointFolder:
    """Saves and loads the checkpoints of a run; all ranks call the same.

    The last `keep` are kept, and of the older ones every one whose step is divisible by `keep_every`.
    """

    def __init__(self, path: str | Path, *, keep: int = 2, keep_every: int = 0) -> None:
        self.path, self._keep, self._keep_every = Path(path), keep, keep_every

    def save(self, engine: Saves, step: int, extra: Mapping[str, Any], *, wait: bool = False) -> None:
        """Save after `step`. Without `wait` this returns when the state is copied; an error of the writing is
        raised by the next save, or by engine.finish_saving()."""
        engine.save(self._of(step), extra=extra, wait=wait, then=lambda: self._is_saved(step))

    def load_last(self, engine: Saves, say: Callable[[str], None] = print) -> dict[str, Any] | None:
        """Load the newest checkpoint that is whole, and return its extra; None if there is none.

        Damaged ones are named to `say`, and passed over.
        """
        for step in self._steps_of_all():
            try:
                open_whole(self._of(step))
            except UserError as error:
                say(f"{error}; trying the one before")
                continue
            return engine.load(self._of(step), verify=False)
        return None

    def discard_from(self, step: int) -> None:
        """Remove those of `step` and later, newest first; on one rank, while nothing is saved."""
        for late in self.steps():
            if late >= step:
                shutil.rmtree(self._of(late))

    def steps(self) -> list[int]:
        """Those with a final name, newest first."""
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        found = [_NAME.fullmatch(name) for name in names]
        return sorted((int(match[1]) for match in found if match is not None), reverse=True)

    def _steps_of_all(self) -> list[int]:
        """As rank 0 sees them, on every rank."""
        return list(decide_on_rank_0(self.steps)) if dist.is_initialized() else self.steps()

    def _of(self, step: int) -> Path:
        return self.path / f"{_PREFIX}{step:08d}"

    def _is_saved(self, step: int) -> None:
        """On rank 0, when a checkpoint has its name: it is the latest, and old ones go."""
        part = self.path / f".{LATEST}"
        part.write_text(self._of(step).name, encoding="utf-8")
        os.replace(part, self.path / LATEST)
        for old in self.steps()[self._keep :]:
            if not self._keep_every or old % self._keep_every:
                shutil.rmtree(self._of(old))
