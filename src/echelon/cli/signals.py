"""SIGTERM as an exception, so that a command ends its ranks and marks its run before it exits."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from echelon.cli.options import is_first_rank

EXIT_CODE = 128 + signal.SIGTERM


class Terminated(BaseException):
    """This process was asked to end. Not an Exception, so that no handler takes it for a failure."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated in the main thread, the only one where Python handles signals.

    Ranks of torchrun other than 0 have nothing to clean up, so they end at once, even inside a collective.
    """
    if threading.current_thread() is not threading.main_thread() or not is_first_rank():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(*_: object) -> None:
    # `timeout` and others send it twice; the second must not interrupt the cleanup after the first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated("terminated (SIGTERM)")
