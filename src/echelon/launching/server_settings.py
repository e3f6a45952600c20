"""The first import of the fork server: settings for the modules that it imports after this.

CUDA: a rank cannot use it if the process that it was forked from has started it. If a module asks torch
whether CUDA is available while it is imported, NVML must answer.

Garbage: what a module makes while it is imported mostly lives forever, and the collector would look through
it again and again, for a quarter of the time.

Its folder: multiprocessing makes one for the server's socket, and the parent removes it at its end. A parent
that is killed cannot, and maybe no rank has started that could; so the server does.

Ctrl-C: a terminal sends it to the server too, which would print a traceback while it imports. It is meant for
the parent.

Every process that the server forks has the usual settings again: ranks, and the user's own processes, because
multiprocessing has one fork server for all.
"""

import atexit
import gc
import os
import shutil
import signal
from multiprocessing import forkserver
from pathlib import Path

_SERVER_PID, _PARENT_PID = os.getpid(), os.getppid()
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_is_set_by_user = _NVML_CHECK in os.environ
# Blocked, not ignored: multiprocessing gives the handlers of this moment to every process that it forks.
_SIGNALS_BEFORE = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _restore_settings() -> None:
    """In a process that was forked: undo the settings, if the server forked it.

    What the server has imported is never garbage. The collector would write into each object that it looks
    at, so every process would need memory of its own for all of them.
    """
    if os.getppid() != _SERVER_PID:  # a rank forked it: its settings are those of the user
        return
    gc.freeze()
    gc.enable()
    signal.pthread_sigmask(signal.SIG_SETMASK, _SIGNALS_BEFORE)
    if not _is_set_by_user:
        os.environ.pop(_NVML_CHECK, None)


def _remove_folder() -> None:
    """At the end of the server, if its parent is gone: remove multiprocessing's folder."""
    address = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    if os.getpid() == _SERVER_PID and os.getppid() != _PARENT_PID and address:
        folder = Path(address).parent
        if folder.name.startswith("pymp-"):
            shutil.rmtree(folder, ignore_errors=True)


atexit.register(_remove_folder)
os.environ.setdefault(_NVML_CHECK, "1")
gc.disable()
os.register_at_fork(after_in_child=_restore_settings)
