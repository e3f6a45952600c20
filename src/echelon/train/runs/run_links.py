"""Links, pipes and devices in the folder of a run: who goes on with the run of a stranger must neither write
where a link leads, nor wait for a pipe."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

_MOST_SHOWN = 5


def link_errors(folder: Path) -> list[str]:
    """An error for all in a folder that is neither a file nor a folder; the first few."""
    errors: list[str] = []
    for path, kind in _others(folder):
        if len(errors) == _MOST_SHOWN:
            return [*errors, "and more of them"]
        errors.append(
            f"{path}: is a {kind}, and a run has only its own files and folders; replace it by what it means"
        )
    return errors


def _others(folder: Path) -> Iterator[tuple[Path, str]]:
    for parent, folders, files in os.walk(folder):  # follows no link
        for name in (*folders, *files):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                yield path, "link" if stat.S_ISLNK(mode) else "pipe, socket or device"
