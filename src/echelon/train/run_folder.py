"""The run folder: what a training run leaves behind, and how to tell a whole one from a broken one.

    runs/train-20261115-020304/
        run.json         state (running, failed, finished), job, plan, versions, summary
        metrics.jsonl    one line a step, and one an evaluation
        loss.svg         the loss over the steps
        sample.txt       what the model writes
        model/           the weights, as a Hugging Face folder

`run.json` says `finished` only after everything else is written; it is replaced in one move, never edited.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from echelon.errors import UserError


class RunFolder:
    """One run's folder. Every write that the machine refuses becomes a UserError that names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, out: Path, name: str, about: dict[str, Any]) -> "RunFolder":
        """A new folder under `out`, named by the moment, marked as running."""
        moment = datetime.now(UTC)
        stem = f"{name}-{moment:%Y%m%d-%H%M%S}"
        with _explained(out):
            out.mkdir(parents=True, exist_ok=True)
            for number in range(1, 1000):
                path = out / (stem if number == 1 else f"{stem}-{number}")
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    continue
        folder = cls(path)
        folder.mark("running", {"started": moment.isoformat(timespec="seconds"), **about})
        return folder

    def mark(self, state: str, about: dict[str, Any]) -> None:
        """Replace run.json: what it says already, what is new, and the state."""
        known = json.loads(self._state_file.read_text()) if self._state_file.exists() else {}
        self.write("run.json", json.dumps({**known, **about, "state": state}, indent=2) + "\n")

    def write(self, name: str, text: str) -> Path:
        """Write a small file whole, or not at all."""
        path = self.path / name
        with _explained(path):
            temporary = path.with_name(f".{name}.part")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        return path

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Add lines of JSON to a file."""
        path = self.path / name
        with _explained(path), path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def fail(self, reason: str) -> None:
        """Mark as failed, where the machine still lets us write at all."""
        # A full disk may be why it failed. Then the state stays `running`, which is not `finished` either.
        with suppress(UserError):
            self.mark("failed", {"reason": reason})

    @property
    def state(self) -> str:
        return str(json.loads(self._state_file.read_text())["state"])

    @property
    def _state_file(self) -> Path:
        return self.path / "run.json"


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror or error}; free space there, or choose another folder "
            "with --set out=FOLDER"
        ) from error
