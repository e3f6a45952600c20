import signal
import threading

import pytest

from echelon.launching.interrupts import deferred_interrupts


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
