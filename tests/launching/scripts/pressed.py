"""Is interrupted just after each start of the fork server and of the tracker, then launches.

Prints how often it was interrupted, and how many processes of its own are left.
"""

import multiprocessing.util
import os
import signal
import threading

import echelon
from echelon.launching.preloading import fork_server_context
from tests.launching.processes import descendants, wait_until

_spawn = multiprocessing.util.spawnv_passfds
_is_started, _is_pressed = threading.Event(), threading.Event()
_presses = []


def press() -> None:
    """In a thread that has blocked no signal, as those of a notebook's kernel."""
    _is_started.wait()
    os.kill(os.getpid(), signal.SIGINT)
    _is_pressed.set()


def spawn_and_press(*arguments: object) -> object:
    pid = _spawn(*arguments)  # type: ignore[arg-type]
    _presses.append(pid)
    _is_started.set()
    _is_pressed.wait()
    return pid


def main() -> None:
    threading.Thread(target=press, daemon=True).start()
    multiprocessing.util.spawnv_passfds = spawn_and_press  # type: ignore[assignment]
    interrupted = 0
    try:
        fork_server_context()
    except KeyboardInterrupt:
        interrupted += 1
    echelon.launch(os.getpid, 2)
    wait_until(lambda: len(descendants(os.getpid())) == 2, 20)
    print(interrupted, len(_presses), len(descendants(os.getpid())))


if __name__ == "__main__":
    main()
