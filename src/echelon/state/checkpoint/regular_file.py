"""Files of a checkpoint are opened as what they must be: regular files in its folder, no links out of it."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from echelon.errors import DamagedError, UserError


def no_links(path: str, flags: int) -> int:
    """An `opener` for open(): refuses links, folders, pipes and devices, and waits for none of them."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is not a regular file", path)
    return descriptor


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a file of a checkpoint to read. Errors of the disk are errors of this file."""
    try:
        with open(path, "rb", opener=no_links) as file:
            yield file
    except OSError as error:
        kind = DamagedError if isinstance(error, FileNotFoundError) else UserError
        raise kind(f"{path}: cannot be read: {_reason(error, path)}") from error


def read_regular(path: Path, most_bytes: int) -> bytes:
    """All bytes of a small file."""
    with open_regular(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes <= most_bytes:
            return file.read(most_bytes)
    raise DamagedError(f"{path}: has {num_bytes} bytes; must have {most_bytes} at most")


def _reason(error: OSError, path: Path) -> str:
    if path.is_symlink():
        return "is a link; the files of a checkpoint must be in its folder"
    return error.strerror or str(error)
