"""What the run.json of a folder says, whoever wrote it."""

from pathlib import Path
from typing import Any

from echelon.state.bounded_json import MOST_BYTES, parse_json
from echelon.state.checkpoint.file_checks import read_regular
from echelon.state.checkpoint.folder import RUN_FILE

FINISHED = "finished"
PREEMPTED = "preempted"


def read_about(path: Path) -> dict[str, Any] | None:
    """What the run.json of a folder says; None if it cannot be read."""
    try:
        about = parse_json(read_regular(path / RUN_FILE, MOST_BYTES))
    except ValueError:  # also a UserError, of a file that cannot be read
        return None
    return about if isinstance(about, dict) else None


def is_unfinished(path: Path) -> bool:
    """Whether a folder is that of a run that --resume can go on with."""
    about = read_about(path) or {}
    return isinstance(about.get("job"), dict) and about.get("state") not in (None, FINISHED)
