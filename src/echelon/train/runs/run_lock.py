"""One process at a time trains in a run folder: a lock that the system releases when the process ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon.errors import UserError
from echelon.train.runs.run_folder import explain_os_errors

_LOCK = ".lock"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the lock of a run folder; a UserError if another process holds it."""
    path = run / _LOCK
    with explain_os_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"the run in {run} is still being trained, by another process; wait for its end, or end it"
            ) from None
        yield
    finally:
        os.close(descriptor)
