"""Links in the folder of a run: who goes on with the run of a stranger must not write where they lead."""

import os
from collections.abc import Iterator
from pathlib import Path

_MOST_SHOWN = 5


def link_errors(folder: Path) -> list[str]:
    """An error for each link below a folder, itself left out; the first few."""
    errors: list[str] = []
    for link in _links(folder):
        if len(errors) == _MOST_SHOWN:
            return [*errors, "and more links"]
        errors.append(
            f"{link}: is a link, and a run is written only inside its folder; replace it by what it means"
        )
    return errors


def _links(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):  # follows none
        yield from (
            Path(parent, name) for name in (*folders, *files) if os.path.islink(os.path.join(parent, name))
        )
