"""Inside the fork server: it imports the training modules while the first launch of a process runs.

With them, the server would take longer to start than a launch that does not train may take. Without them,
every rank that trains would import them for itself. So the server starts without them, and the first ranks
ask for them.

Only the fork server imports this module (by `preloading.py`): the import installs a signal handler. The
ranks, as forks of the server, have the module too.
"""

import contextlib
import os
import signal
import sys
import threading
from importlib import import_module

from echelon.launching.preloading import TRAINING_MODULES

_SERVER_PID = os.getpid()
_REQUEST = signal.SIGUSR2

# A fork while another thread imports would leave a rank with half a module, and locked. So whoever imports
# or forks holds this lock: a launch waits for an import that has begun.
_lock = threading.Lock()


def request_training_modules() -> None:
    """In a rank: let the server import the training modules for later ranks, unless it has them."""
    is_loaded = all(name in sys.modules for name in TRAINING_MODULES)
    if not is_loaded and os.getppid() == _SERVER_PID:
        os.kill(_SERVER_PID, _REQUEST)


def leave_server() -> None:
    """In a new rank: give the signal back to the user's function."""
    if signal.getsignal(_REQUEST) is _on_request:
        signal.signal(_REQUEST, signal.SIG_DFL)


def _on_request(*_: object) -> None:
    """Import in a thread, because the main thread reports the ends of ranks meanwhile."""
    # The lock is taken here and not in the thread: the next fork must not overtake the import. It is not free
    # while another request is served, or in the middle of a fork; then the next launch asks again.
    if _lock.acquire(blocking=False):
        threading.Thread(target=_import_training_modules, name="echelon-preload").start()


def _import_training_modules() -> None:
    try:
        for name in TRAINING_MODULES:
            # What cannot be imported here raises its error in the rank that needs it.
            with contextlib.suppress(Exception):
                import_module(name)
    finally:
        _lock.release()


signal.signal(_REQUEST, _on_request)
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
