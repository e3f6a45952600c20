"""Inside the fork server: it imports the training modules while the first launch of a process runs.

They take as long to import as torch, so a server that began with them would delay launches that do not
train; without them, every rank that trains would import them for itself. So the server starts without them,
and the first ranks request them.

Importing this module installs a signal handler. Only the fork server does that (see `preloading.py`); the
ranks inherit the module from it.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from importlib import import_module

from echelon.launching.preloading import TRAINING_MODULES
from echelon.launching.server_settings import end_without_parent, remove_folder

_SERVER_PID = os.getpid()
_REQUEST = signal.SIGUSR2
_LOOK_SECONDS = 0.2

# A rank that is forked during an import would have half a module, locked forever. So importing and forking
# both take this lock: a launch waits for an import that has begun.
_lock = threading.Lock()


def request_training_modules() -> None:
    """In a rank: let the server import the training modules for later ranks, unless it has them."""
    is_loaded = all(name in sys.modules for name in TRAINING_MODULES)
    if not is_loaded and os.getppid() == _SERVER_PID:
        os.kill(_SERVER_PID, _REQUEST)


def _leave_server() -> None:
    """In a process that was forked: release the lock, and give the signal back to the user."""
    _lock.release()
    if signal.getsignal(_REQUEST) is _on_request:
        signal.signal(_REQUEST, signal.SIG_DFL)


def _on_request(*_: object) -> None:
    """Start a thread that imports, because the main thread must go on reporting the ends of ranks."""
    # The lock is taken here and not in the thread, so that no fork overtakes the import. If it is not free
    # (another request is served, or a fork is under way), the next launch asks again.
    if _lock.acquire(blocking=False):
        threading.Thread(target=_import_training_modules, name="echelon-preload", daemon=True).start()


def _import_training_modules() -> None:
    try:
        for name in TRAINING_MODULES:
            # What cannot be imported here raises its error in the rank that needs it.
            with contextlib.suppress(Exception):
                import_module(name)
    finally:
        _lock.release()


def _await_import() -> None:
    """Before a fork: take the lock, or end with the parent, which need not wait for an import."""
    while not _lock.acquire(timeout=_LOOK_SECONDS):
        end_without_parent()


def _end_during_import() -> None:
    """End the server with its parent: it must not keep the parent's output open until it has imported."""
    if _lock.locked() and os.getpid() == _SERVER_PID:
        remove_folder()
        os._exit(0)  # a normal exit tears modules down while the thread still imports


signal.signal(_REQUEST, _on_request)
atexit.register(_end_during_import)
os.register_at_fork(before=_await_import, after_in_parent=_lock.release, after_in_child=_leave_server)
