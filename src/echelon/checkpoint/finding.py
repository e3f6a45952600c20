"""Which checkpoint a path means: that of a folder itself, or the newest of a folder of them, or of a run."""

from pathlib import Path

from echelon.checkpoint.folder import CheckpointFolder
from echelon.checkpoint.manifest import MANIFEST
from echelon.errors import UserError

RUN_FILE, CHECKPOINTS = "run.json", "checkpoints"


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at a path. Whether it is whole is another question."""
    if (path / MANIFEST).exists():
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


def find_run(path: Path) -> Path | None:
    """The run folder that a path is, or is in; None if it has none."""
    path = path.absolute()
    places = (path, path.parent, path.parent.parent)
    return next((place for place in places if (place / RUN_FILE).is_file()), None)
