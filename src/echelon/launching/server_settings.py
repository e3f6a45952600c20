"""The first import of the fork server: settings for the modules that it imports after this.

CUDA: a rank cannot use it if the process that it was forked from has started it. If a module asks torch
whether CUDA is available while it is imported, NVML must answer.

Garbage: what a module makes while it is imported mostly lives forever, and the collector would look through
it again and again, for a quarter of the time.

Its end: when the parent is gone, also while modules are imported, which takes long on a busy machine. Then
the server removes the folder that multiprocessing has made for its socket, in which the folders of launches
are: a parent that was killed cannot, and maybe no rank has started that could.

Signals: a terminal sends Ctrl-C to the server too, and `timeout` SIGTERM. Both are meant for the parent,
which may need its ranks to save; and ranks end with the server.

Every process that the server forks has the usual settings again: ranks, and the user's own processes, because
multiprocessing has one fork server for all.
"""

import atexit
import gc
import os
import shutil
import signal
import threading
import time
from pathlib import Path

from echelon.launching.preloading import PARENT

_SERVER_PID = os.getpid()
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_is_set_by_user = _NVML_CHECK in os.environ
_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_REMOVE_SECONDS, _LOOK_SECONDS = 1.0, 0.2

# Blocked, not ignored: multiprocessing gives the handlers of this moment to every process that it forks. The
# parent has blocked them already for the moments before this line (preloading.py).
_signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS) - _SIGNALS

# Of the process that has started this server, and multiprocessing's folder there; not in other processes. The
# parent says so itself: it may have been killed before this line.
_parent_pid, _, _folder_name = os.environ.pop(PARENT, "0 ").partition(" ")
_folder = Path(_folder_name) if Path(_folder_name).name.startswith("pymp-") else None


def is_parent_gone() -> bool:
    """Return whether the process that started this server has ended.

    Its pipe does not tell: requests that wait in the socket, and ranks, hold it open.
    """
    return _parent_pid != "0" and os.getppid() != int(_parent_pid)


def remove_folder() -> None:
    """At the end of the server, if its parent is gone: remove multiprocessing's folder."""
    if os.getpid() != _SERVER_PID or _folder is None or not is_parent_gone():
        return
    give_up = time.monotonic() + _REMOVE_SECONDS
    while _folder.exists() and time.monotonic() < give_up:  # a rank that starts may make a file meanwhile
        shutil.rmtree(_folder, ignore_errors=True)


def end_without_parent() -> None:
    """End this server now if its parent is gone."""
    if is_parent_gone():
        remove_folder()
        os._exit(0)  # a normal exit waits for threads that import


class _ParentWatch:
    """A thread that ends the server with its parent while modules are imported. It is gone before the server
    forks: a child would inherit its locks."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echelon-parent-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if os.getpid() == _SERVER_PID and not self._is_over.is_set():
            self._is_over.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            end_without_parent()


def _restore_settings() -> None:
    """In a process that was forked: undo the settings, if the server forked it.

    What the server has imported is never garbage. The collector would write into each object that it looks
    at, so every process would need memory of its own for all of them.
    """
    if os.getppid() != _SERVER_PID:  # a rank forked it: its settings are those of the user
        return
    gc.freeze()
    gc.enable()
    signal.pthread_sigmask(signal.SIG_SETMASK, _signals_before)
    if not _is_set_by_user:
        os.environ.pop(_NVML_CHECK, None)


atexit.register(remove_folder)
os.environ.setdefault(_NVML_CHECK, "1")
gc.disable()
os.register_at_fork(after_in_child=_restore_settings)
if _folder is not None:
    os.register_at_fork(before=_ParentWatch().stop)
