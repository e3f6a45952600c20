"""SIGTERM and Ctrl-C as exceptions, so that a command ends its ranks and marks its run before it exits."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from echelon.cli.options import is_first_rank

EXIT_CODE = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT


class Terminated(BaseException):
    """This process was asked to end. Not an Exception, so that no handler takes it for a failure."""


class Interrupted(BaseException):
    """Ctrl-C. Unlike KeyboardInterrupt, typer lets it through, with the notes on what was under way."""


@contextmanager
def ctrl_c_keeps_notes() -> Iterator[None]:
    """Turn a KeyboardInterrupt into Interrupted, which says the same and keeps its notes."""
    try:
        yield
    except KeyboardInterrupt as error:
        interrupted = Interrupted("interrupted")
        for note in getattr(error, "__notes__", ()):
            interrupted.add_note(note)
        raise interrupted from None


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
