"""No orphans: a rank ends when the process that launched it is gone, however that process ended.

This is the rank's side. The parent ends its ranks itself where it still can (`member.py`).
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


def hold(folders: Iterable[Path]) -> None:
    """Tie this process, and all it starts, to the life of its parent; `folders` go with them."""
    # A session of its own: Ctrl-C reaches the parent only, and one killpg reaches every data worker.
    os.setsid()
    threading.Thread(target=_watch, args=(folders,), name="echelon-lifeline", daemon=True).start()
    if sys.platform == "linux":
        # The second rope, for a rank that never lets Python threads run. The kernel pulls it when the
        # fork server has ended, which takes longer than the watching thread needs to clean up.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(folders: Iterable[Path]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started through multiprocessing"
    # The sentinel is a pipe whose other end only the parent holds: ranks are forked from the fork
    # server, which never had it.
    wait([parent.sentinel])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
