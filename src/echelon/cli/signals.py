"""SIGTERM and Ctrl-C as exceptions, so that a command ends its ranks and marks its run before it exits.

Both are often sent twice. The second must neither interrupt what the command does after the first, nor change
an exit code that is decided.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from echelon.cli.options import is_first_rank
from echelon.train.runs import Preempted

EXIT_CODE = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
_TWICE_SECONDS = 1.0  # a second Ctrl-C within this time is the first; a later one ends the cleanup


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
def signals_raise(*, process_ends: bool = False) -> Iterator[None]:
    """Inside, SIGTERM raises Terminated and Ctrl-C KeyboardInterrupt, in the main thread, the only one where
    Python handles signals. After it they are what they were before, or ignored if the process ends then.

    Ranks of torchrun other than 0 have nothing to clean up, so they end at once, even inside a collective.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with ExitStack() as stack:
        since: list[float] = []

        def interrupt(*_: object) -> None:
            if not since or time.monotonic() - since[0] >= _TWICE_SECONDS:
                since[:] = [time.monotonic()]
                raise KeyboardInterrupt

        for number, handler in ((signal.SIGTERM, _raise), (signal.SIGINT, interrupt)):
            after = signal.SIG_IGN if process_ends else signal.getsignal(number)
            stack.callback(signal.signal, number, after)
            # A shell starts commands in the background with Ctrl-C ignored.
            is_ignored = number == signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN
            if is_first_rank() and not is_ignored:
                signal.signal(number, handler)
        yield


def _raise(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` and others send it twice
    if not isinstance(sys.exception(), Preempted):  # on its way out: all is saved, and nothing is left to end
        raise Terminated("terminated (SIGTERM)")
