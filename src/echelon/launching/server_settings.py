"""The first import of the fork server: settings for the modules that it imports after this.

CUDA: a rank cannot use it if the process that it was forked from has started it. If a module asks torch
whether CUDA is available while it is imported, NVML must answer.

Garbage: what a module makes while it is imported mostly lives forever, and the collector would look through
it again and again, for a quarter of the time.

Every process that the server forks has the usual settings again: ranks, and the user's own processes, because
multiprocessing has one fork server for all.
"""

import gc
import os

_SERVER_PID = os.getpid()
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
_is_set_by_user = _NVML_CHECK in os.environ


def _restore_settings() -> None:
    """In a process that was forked: undo the settings, if the server forked it.

    What the server has imported is never garbage. The collector would write into each object that it looks
    at, so every process would need memory of its own for all of them.
    """
    if os.getppid() != _SERVER_PID:  # a rank forked it: its settings are those of the user
        return
    gc.freeze()
    gc.enable()
    if not _is_set_by_user:
        os.environ.pop(_NVML_CHECK, None)


os.environ.setdefault(_NVML_CHECK, "1")
gc.disable()
os.register_at_fork(after_in_child=_restore_settings)
