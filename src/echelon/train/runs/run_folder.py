"""The run folder: what a training run leaves, and how to tell a finished run from a broken one.

    runs/train-20261115-020304/
        run.json         state (running, failed, preempted, finished), job, plan, versions, pid, events,
                         summary
        metrics.jsonl    one line per step, and one per evaluation
        measured.json    what each rank held at its peak and moved in a step
        saved.jsonl      one line per checkpoint
        trace.json       the instructions of some steps, for Perfetto, if the job has `trace`
        loss.svg         the loss over the steps
        experts.svg      of a model with experts: the share of each in the tokens, and the entropy of gates
        sample.txt       what the model writes
        model/           the weights, as a Hugging Face folder
        checkpoints/     all that is needed to go on

`run.json` says `finished` only after everything else is written. It is replaced in one step, never edited.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from echelon.errors import UserError
from echelon.state.bounded_json import MOST_BYTES, parse_json
from echelon.state.checkpoint.atomic import sync_path
from echelon.state.checkpoint.file_checks import read_regular
from echelon.state.checkpoint.folder import RUN_FILE
from echelon.train import strict_json

MAX_RUNS_PER_SECOND = 999

_ELSEWHERE = "choose another folder with --set out=FOLDER"

# By the reason of the machine: how to fix it. {elsewhere} works for every reason.
_FIXES = {
    errno.ENOSPC: "free space there, or {elsewhere}",
    errno.EDQUOT: "free space there, or {elsewhere}",
    errno.ENAMETOOLONG: "choose a shorter name with --set name=NAME, or a shorter out",
    errno.EACCES: "give this user the right to write there, or {elsewhere}",
    errno.EPERM: "give this user the right to write there, or {elsewhere}",
    errno.EROFS: "it is on a read-only disk; {elsewhere}",
    errno.EEXIST: "it is a file, not a folder; {elsewhere}",
    errno.ENOTDIR: "a part of the path is a file, not a folder; {elsewhere}",
}


class RunFolder:
    """The folder of one run. A write that fails becomes a UserError that names the file."""

    def __init__(self, path: Path, made: Sequence[Path] = ()) -> None:
        self.path = path
        self._made = made  # the folders above it that are new, innermost first

    @classmethod
    def create(cls, out: Path, name: str, about: dict[str, Any]) -> "RunFolder":
        """A new folder under `out`, named by the time, marked as running."""
        moment = datetime.now(UTC)
        stem = f"{name}-{moment:%Y%m%d-%H%M%S}"
        made = [path for path in (out, *out.parents) if not path.exists()]
        with explain_os_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        for number in range(1, MAX_RUNS_PER_SECOND + 1):  # two runs of the same second get two folders
            path = out / (stem if number == 1 else f"{stem}-{number}")
            with explain_os_errors(path), suppress(FileExistsError):
                path.mkdir()
                break
        else:
            raise UserError(
                f"cannot make {out / stem}: {MAX_RUNS_PER_SECOND} runs of this name began in this second; "
                "choose another name with --set name=NAME"
            )
        folder = cls(path, made)
        folder.mark("running", {"started": moment.isoformat(timespec="seconds"), **about})
        return folder

    def note(self, kind: str, **values: Any) -> None:
        moment = datetime.now(UTC).isoformat(timespec="seconds")
        about = self.about()
        events = [*about.get("events", ()), {"kind": kind, "time": moment, **values}]
        self.mark(str(about["state"]), {"events": events})

    def limit_steps(self, steps: int, warmup: int) -> None:
        """Let the job of the run have so many steps, and no limit of time any more."""
        about = self.about()
        job = {key: value for key, value in about["job"].items() if key != "minutes"}
        optimizer = {**job.get("optimizer", {}), "warmup": warmup}
        self.mark(str(about["state"]), {"job": {**job, "steps": steps, "optimizer": optimizer}})

    def mark(self, state: str, about: dict[str, Any]) -> None:
        """Replace run.json: its old entries, the new ones, and the state."""
        earlier = self.about() if (self.path / RUN_FILE).exists() else {}
        self.write(RUN_FILE, strict_json.dump({**earlier, **about, "state": state}, indent=2) + "\n")

    def write(self, name: str, text: str, *, sync: bool = False) -> Path:
        """Write a small file completely, or not at all; with `sync`, it is on the disk then."""
        path = self.path / name
        with explain_os_errors(path):
            temporary = path.with_name(f".{name}.part")
            temporary.write_text(text, encoding="utf-8")
            if sync:
                sync_path(temporary)
            os.replace(temporary, path)
            if sync:
                sync_path(self.path)
        return path

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        path = self.path / name
        with explain_os_errors(path), path.open("a", encoding="utf-8") as file:
            file.writelines(strict_json.dump(line) + "\n" for line in lines)

    def fail(self, reason: str) -> None:
        # The disk may be full. Then the state stays `running`, which is not `finished` either.
        with suppress(UserError):
            self.mark("failed", {"reason": reason})

    def discard(self) -> None:
        """Remove the folder of a run that never began, and the empty folders that were made for it."""
        with suppress(OSError):
            shutil.rmtree(self.path)
            for path in self._made:
                path.rmdir()

    @property
    def state(self) -> str:
        return str(self.about()["state"])

    def about(self) -> dict[str, Any]:
        about: dict[str, Any] = json.loads((self.path / RUN_FILE).read_text(encoding="utf-8"))
        return about


def place_error(out: Path) -> str | None:
    """Why no folder can be made under `out`, as far as this shows without making one."""
    nearest = next(path for path in (out.absolute(), *out.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir():
        return f"{nearest} is a file, not a folder; {_ELSEWHERE}"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"cannot write {nearest}: {_fix(errno.EACCES)}"
    return None


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError while writing `path` into a UserError that says how to fix it."""
    try:
        yield
    except OSError as error:
        fix = _fix(error.errno or 0)
        raise UserError(f"cannot write {path}: {error.strerror or error}; {fix}") from error


def _fix(number: int) -> str:
    return _FIXES.get(number, _ELSEWHERE).format(elsewhere=_ELSEWHERE)


FINISHED = "finished"
PREEMPTED = "preempted"


def read_about(path: Path) -> dict[str, Any] | None:
    """Return the entries of a folder's run.json; None if it cannot be read."""
    try:
        about = parse_json(read_regular(path / RUN_FILE, MOST_BYTES))
    except ValueError:  # also a UserError, of a file that cannot be read
        return None
    return about if isinstance(about, dict) else None


def is_unfinished(path: Path) -> bool:
    """Return whether a folder is that of a run that --resume can go on with."""
    about = read_about(path) or {}
    return isinstance(about.get("job"), dict) and about.get("state") not in (None, FINISHED)


_MOST_SHOWN = 5


def link_errors(folder: Path) -> list[str]:
    """An error for all in a folder that is neither a file nor a folder; the first few."""
    errors: list[str] = []
    for parent, folders, files in os.walk(folder):  # follows no link
        for path in (Path(parent, name) for name in (*folders, *files)):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                continue
            if len(errors) == _MOST_SHOWN:
                return [*errors, "and more of them"]
            kind = "link" if stat.S_ISLNK(mode) else "pipe, socket or device"
            errors.append(
                f"{path}: is a {kind}, and a run has only its own files and folders; replace it by what it "
                "means"
            )
    return errors
