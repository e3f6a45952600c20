"""Plays the fork server: requests a module that takes long to import; meanwhile it forks, or ends.

argv: the folder of `slow_module`, and fork or end. The exit code of a fork is 0 if it has the whole module.
"""

import atexit
import os
import signal
import sys
import threading

atexit.register(print, "a normal exit")  # callbacks run in reverse order: this one after those of the server

from echelon.launching import fork_server  # noqa: E402

sys.path.insert(0, sys.argv[1])

begun, may_end = threading.Event(), threading.Event()  # set and awaited by slow_module

if __name__ == "__main__":
    fork_server.TRAINING_MODULES = ("no_such_module", "slow_module")
    os.kill(os.getpid(), signal.SIGUSR2)
    assert begun.wait(10), "nobody imports slow_module"
    print("the main thread runs on", flush=True)
    if sys.argv[2] == "end":
        sys.exit()

    # Hooks run in the reverse order of their registration, so this one comes before the lock of the server.
    os.register_at_fork(before=may_end.set)
    child = os.fork()
    if child == 0:
        os._exit(0 if getattr(sys.modules.get("slow_module"), "is_whole", False) else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(code)
