import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from echelon.launching.preloading import deferred_interrupts

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.slow_cases("start_fork_server")
@pytest.mark.parametrize("function", [pytest.param("preload", marks=pytest.mark.slow), "start_fork_server"])
def test_a_rank_starts_with_what_was_preloaded_and_nothing_else(function: str) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "preloaded.py", function], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[True, True, False]]


@pytest.mark.slow
def test_an_interrupt_just_after_the_start_of_a_server_leaves_no_second_one() -> None:
    """It comes before multiprocessing has noted the process: a server that it forgets lives forever."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "pressed.py"], capture_output=True, text=True, check=True, env=environment
    )
    # Interrupted once; a tracker and a server were started, and both are left.
    assert done.stdout == "1 2 2\n"


def test_an_interrupt_waits_for_the_end() -> None:
    finished = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts(2):  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        finished.append(True)
    assert finished == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_more_than_the_most_is_handled_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts(1):  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second waited too")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_is_raised_and_the_handler_is_back() -> None:
    with pytest.raises(KeyError), deferred_interrupts(1):
        raise KeyError("lr")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens() -> None:
    with deferred_interrupts(1):
        pass


def test_other_threads_and_ignored_interrupts_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = []

    def look() -> None:
        with deferred_interrupts(1):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    look()
    signal.signal(signal.SIGINT, before)
    assert handlers == [signal.default_int_handler, signal.SIG_IGN]
