"""What one rank does by itself: an operation with other ranks would wait forever, or meet another one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_here = threading.local()  # an update on the host may talk meanwhile


@contextmanager
def alone(reason: str) -> Iterator[None]:
    """Operations with other ranks raise a RuntimeError inside, in this thread."""
    before = getattr(_here, "reason", "")
    _here.reason = reason
    try:
        yield
    finally:
        _here.reason = before


def check_not_alone(operation: str, axis: str) -> None:
    reason = getattr(_here, "reason", "")
    if reason:
        raise RuntimeError(f"{operation} along {axis}: {reason}")
