"""Starts the fork server, and is killed before a rank starts."""

import os
import signal
import time

from echelon.launching import start_fork_server

if __name__ == "__main__":
    start_fork_server()
    time.sleep(0.5)  # it imports for longer
    os.kill(os.getpid(), signal.SIGKILL)
