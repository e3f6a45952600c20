"""Files and folders that appear, are replaced and are removed in one step, also where a process is killed.

A folder that takes the place of another one: the old or the new one is found at any time.
"""

import ctypes
import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

PART_SUFFIX = ".part"  # of the temporary name of a folder: .NAME.TOKEN.part

_AT_WORKING_FOLDER = -100  # of renameat2(2)
_EXCHANGE = 2  # both names exist at any time
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def replace_folder(new: Path, path: Path) -> None:
    """Give `new` the name `path`. A folder that was there gets the name of `new`.

    Raises only while `new` has not got the name; what it leaves, `remove_standby` removes.
    """
    if not path.is_dir() or not any(path.iterdir()):
        new.rename(path)
    elif not _exchange(new, path):
        remove_standby(path)
        # Between the two renames nothing has the name: a job killed here leaves the old one to `locate`.
        path.rename(standby_of(path))
        new.rename(path)
        with suppress(OSError):
            standby_of(path).rename(new)


def remove_standby(path: Path) -> None:
    """Remove what a killed job has left of the folder before; only while there is one at `path`."""
    if path.is_dir() and standby_of(path).is_dir():
        shutil.rmtree(standby_of(path))


def standby_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def locate(path: Path) -> Path:
    """Return where the folder `path` is: elsewhere if a job was killed while it was replaced, on a file
    system that cannot exchange two names."""
    return standby_of(path) if not path.exists() and standby_of(path).is_dir() else path


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; false where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux, or an old C library
        return False
    failed = rename(
        _AT_WORKING_FOLDER,
        os.fsencode(first),
        _AT_WORKING_FOLDER,
        os.fsencode(second),
        ctypes.c_uint(_EXCHANGE),
    )
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(second))


def new_token() -> str:
    """Return a part of a name that no other save has."""
    return secrets.token_hex(4)


def remove_folder(path: Path) -> None:
    """Remove a folder under a temporary name, so that no half of it is ever seen under its own."""
    temporary = path.with_name(f".{path.name}.{new_token()}{PART_SUFFIX}")
    path.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a small file, also for a machine that loses its power: a reader finds the old or new bytes."""
    write_file(path, data)
    sync_path(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write a file that is complete, and on the disk, when it has its name."""
    part = path.with_name(f".{path.name}.{new_token()}")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            # Before the rename: else the name may be on the disk first, and a power loss empties the file.
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Return when a file, or the names in a folder, would outlive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_small_leftovers(path: Path) -> None:
    """Remove what `write_atomically` has left of a killed job; no other job may be writing there."""
    for part in path.parent.glob(f".{path.name}.*"):
        if part.is_symlink() or not part.is_dir():
            part.unlink(missing_ok=True)
