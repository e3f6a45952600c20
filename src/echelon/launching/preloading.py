"""Chooses which modules the fork server imports, so that ranks start with them loaded; and starts the server.

This is the side of the launching process; that of the fork server is `fork_server.py`.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.util import get_temp_dir
from typing import Any

PARENT = "ECHELON_FORK_SERVER_PARENT"  # in the environment of the server: its parent, and its folder

# What a rank that trains imports: the first step of a torch optimizer imports torch._dynamo. Together they
# take 1.5 s. They are named, not imported, because this package is below the engine.
TRAINING_MODULES = ("echelon.engine", "torch._dynamo")

_PRESSES = 10  # of Ctrl-C, which wait for the start of the server: milliseconds

_modules = [
    "echelon.launching.server_settings",
    "torch",
    "torch.distributed",
    "echelon.launching.fork_server",  # after torch: before a fork it must take its lock ahead of all others
    "echelon.launching.group",
    "echelon.launching.worker",
]


def preload(*modules: str) -> None:
    """Add to what the fork server imports at its start; call this before the first launch of the process."""
    _modules.extend(module for module in modules if module not in _modules)


def start_fork_server(*modules: str) -> None:
    """Like `preload`, and start the fork server now, so that it imports while this process does too."""
    preload(*modules)
    fork_server_context()


def fork_server_context() -> ForkServerContext:
    """Return the multiprocessing context that starts processes from the fork server, which runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_modules)
    # An interrupt after the start of a server, or of the tracker, but before multiprocessing has noted it,
    # would leave one that nobody ends. Blocked signals do not help: other threads take them.
    with deferred_interrupts(_PRESSES):
        _ensure_running()
    return context


def _ensure_running() -> None:
    # SIGTERM to the whole process group must not end the server, with which ranks end, before its settings
    # do this. The tracker first: when it starts, it takes these signals from what is blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    os.environ[PARENT] = f"{os.getpid()} {get_temp_dir()}"
    try:
        ensure_running()
    finally:
        del os.environ[PARENT]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
