"""A folder takes the place of another one, which is never missing."""

import ctypes
import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

_AT_WORKING_FOLDER = -100
_EXCHANGE = 2
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def replace_folder(new: Path, path: Path) -> None:
    """Give `new` the name `path`. A folder that was there gets the name of `new`.

    Raises only while `new` has not got the name; what it leaves, `remove_standby` removes.
    """
    if not path.is_dir() or not any(path.iterdir()):
        new.rename(path)
    elif not _exchange(new, path):
        remove_standby(path)
        path.rename(standby_of(path))  # where `standing` finds it
        new.rename(path)
        with suppress(OSError):
            standby_of(path).rename(new)


def remove_standby(path: Path) -> None:
    """Remove what a killed job has left of the checkpoint before; only while there is one at `path`."""
    if path.is_dir() and standby_of(path).is_dir():
        shutil.rmtree(standby_of(path))


def standby_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def standing(path: Path) -> Path:
    """Where the checkpoint `path` is: elsewhere if a job was killed while it was replaced, on a file system
    that cannot do that at once."""
    return standby_of(path) if not path.exists() and standby_of(path).is_dir() else path


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names at once; false where the system cannot."""
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
