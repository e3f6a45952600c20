"""Text files that a user names, perhaps of a stranger: jobs, profiles, schedules."""

import errno
from pathlib import Path

MOST_CHARACTERS = 2**25


def read_text_file(path: Path) -> str:
    """All of it, as UTF-8. One without an end is an OSError, as others that cannot be read."""
    with path.open(encoding="utf-8") as file:
        text = file.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise OSError(errno.EFBIG, f"it has more than {MOST_CHARACTERS} characters")
    return text
