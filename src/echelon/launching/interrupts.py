"""Ctrl-C, and the stop button of a notebook, at moments when they would leave a process behind."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupts(most: int) -> Iterator[None]:
    """Handle up to `most` SIGINT that arrive inside at the end of it; one more is handled at once.

    A rank whose start is interrupted has no known process id. Outside the main thread, where Python handles
    no signal, this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[Any, ...]] = []

    def defer(*event: Any) -> None:
        received.append(event)
        if len(received) > most:
            handler(*event)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        handler(*received[0])
