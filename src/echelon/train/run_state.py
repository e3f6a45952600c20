"""What the run.json of a folder says, whoever wrote it."""

import json
from pathlib import Path
from typing import Any

from echelon.checkpoint.finding import RUN_FILE
from echelon.checkpoint.regular_file import read_regular

FINISHED = "finished"
PREEMPTED = "preempted"
_MOST_BYTES = 10**8  # of run.json


def read_about(path: Path) -> dict[str, Any] | None:
    """What the run.json of a folder says; None if it cannot be read."""
    try:
        about = json.loads(read_regular(path / RUN_FILE, _MOST_BYTES))
    except (ValueError, RecursionError):  # also a UserError, of a file that cannot be read
        return None
    return about if isinstance(about, dict) else None


def is_unfinished(path: Path) -> bool:
    """Whether a folder is that of a run that --resume can go on with."""
    about = read_about(path) or {}
    return isinstance(about.get("job"), dict) and about.get("state") not in (None, FINISHED)
