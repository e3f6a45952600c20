"""No orphans: a rank ends when the process that launched it is gone, however that process ended.

This is the rank's side. A parent that can still act ends its ranks itself (`rank_process.py`).
"""

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable
from multiprocessing.connection import wait
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def end_with_parent(folders: Iterable[Path]) -> None:
    """End this process, and all that it starts, when its parent is gone; delete `folders` then."""
    # With a session of its own, Ctrl-C reaches the parent only, and one killpg reaches every data worker.
    os.setsid()
    threading.Thread(target=_watch, args=(folders,), name="echelon-lifeline", daemon=True).start()
    if sys.platform == "linux":
        # For a rank that never lets Python threads run. The kernel sends this signal when the fork server
        # has ended, which takes longer than the watching thread needs to clean up.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(folders: Iterable[Path]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "multiprocessing starts every rank"
    # The sentinel is a pipe whose other end only the parent holds: the fork server, from which ranks are
    # forked, never had it.
    wait([parent.sentinel])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
