"""SIGTERM as an exception, so that a command ends its ranks and marks its run before it goes."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from echelon.cli.options import is_first_rank

EXIT_CODE = 128 + signal.SIGTERM


class Terminated(BaseException):
    """Somebody asked this process to end. Not an Exception: nothing on the way may take it for a failure."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated (in the main thread, where alone Python hears signals).

    A later rank of torchrun has nothing to clear up, so it goes at once, even out of a collective.
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
    # `timeout` and others send it twice; the second must not break into the clearing up after the first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated("terminated (SIGTERM)")
