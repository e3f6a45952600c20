"""Errors of disks and remote storage as errors of the user; some go away when the work is done again."""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from echelon.errors import UserError

T = TypeVar("T")

RETRIES = 3
_FIRST_PAUSE = 0.5  # seconds; each one after it is twice as long

_FIXES = {
    errno.ENOSPC: "free some space, keep fewer checkpoints, or save elsewhere",
    errno.EDQUOT: "free some of your quota, keep fewer checkpoints, or save elsewhere",
    errno.EFBIG: "raise the limit of a file's size: ulimit -f unlimited",
    errno.EROFS: "the file system can only be read; save elsewhere",
    errno.EACCES: "make the folder writable for this user, or save elsewhere",
    errno.EPERM: "make the folder writable for this user, or save elsewhere",
    errno.ENOENT: "was it deleted while it was being written?",
}
# Errors that doing it again does not change.
_LASTING = {*_FIXES, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP}


_NOT_WRITTEN = "the checkpoint cannot be written: {}; checkpoints before it, if any, are as they were"
_NOT_TIDIED = (
    "the checkpoint is saved, but what comes after it (old files and checkpoints are removed, the latest is "
    "named) failed: {}"
)


@contextmanager
def report_write_errors(place: object, *, is_whole: bool = False) -> Iterator[None]:
    """Raise errors of the storage with the rule, the place and the fix. `is_whole`: it is saved."""
    try:
        yield
    except OSError as error:
        fix = _FIXES.get(error.errno or 0)
        reason = reason_of(error) + (f" ({fix})" if fix else "")
        raise UserError(f"{place}: {(_NOT_TIDIED if is_whole else _NOT_WRITTEN).format(reason)}") from error


def reason_of(error: OSError) -> str:
    """Return the words of the system, or of the package of a storage, for an error."""
    return error.strerror or str(error) or type(error).__name__


def with_retries(work: Callable[[], T], retries: int, stop: Callable[[], bool] = lambda: False) -> T:
    """Do `work`, and do it again after an error that may pass, at most `retries` times."""
    for attempt in range(retries):
        try:
            return work()
        except OSError as error:
            if error.errno in _LASTING or stop():
                raise
        _pause(_FIRST_PAUSE * 2**attempt)
    return work()


def _pause(seconds: float) -> None:
    time.sleep(seconds)


def is_url(path: str | Path) -> bool:
    """Return whether it names remote storage (s3://bucket/run); a file:// URL is a folder."""
    return isinstance(path, str) and "://" in path and not path.startswith("file://")


def as_folder(path: str | Path) -> Path:
    return Path(path.removeprefix("file://") if isinstance(path, str) else path)
