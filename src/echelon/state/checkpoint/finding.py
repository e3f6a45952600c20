"""Which checkpoint a path means: that of a folder itself, or the newest of a folder of them, or of a run."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from echelon.errors import DamagedError, UserError
from echelon.state.checkpoint.folder import CheckpointFolder, step_of
from echelon.state.checkpoint.manifest import MANIFEST
from echelon.state.checkpoint.saved import SavedState

RUN_FILE, CHECKPOINTS = "run.json", "checkpoints"


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at a path. Whether it is whole is another question."""
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
    """Inside, an error that this checkpoint is damaged also names the one before it, if there is one."""
    try:
        yield
    except DamagedError as error:
        before = _one_before(checkpoint)
        fix = [] if before is None else [f"give the one before it: {before}"]
        raise DamagedError(error.title, [*error.errors, *fix]) from error


def _one_before(checkpoint: Path) -> Path | None:
    """The newest of an earlier step whose manifest and sizes of files are right; hashes would take long."""
    step = step_of(checkpoint.name)
    if step is None:
        return None
    folder = CheckpointFolder(checkpoint.parent)
    for earlier in (each for each in folder.steps() if each < step):
        with suppress(UserError):
            return SavedState.open(folder.path_of(earlier)).path
    return None


def find_run(path: Path) -> Path | None:
    """The run folder that a path is, or is in; None if it has none."""
    path = path.absolute()
    places = (path, path.parent, path.parent.parent)
    return next((place for place in places if (place / RUN_FILE).is_file()), None)
