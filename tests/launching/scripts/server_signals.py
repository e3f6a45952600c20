"""Exits with 0 if the settings of the fork server block Ctrl-C and SIGTERM, and a process that it forks has
neither blocked. The parent has blocked both before, or (with an argument) not."""

import os
import signal
import sys

BOTH = {signal.SIGINT, signal.SIGTERM}


def blocked() -> set[int]:
    return BOTH & signal.pthread_sigmask(signal.SIG_BLOCK, ())


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_UNBLOCK if sys.argv[1:] else signal.SIG_BLOCK, BOTH)
    from echelon.launching import server_settings  # noqa: F401

    assert blocked() == BOTH
    if os.fork() == 0:
        os._exit(len(blocked()))
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
