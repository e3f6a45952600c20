"""What was written, on the disk: it is there after the machine has lost its power."""

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """A file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
