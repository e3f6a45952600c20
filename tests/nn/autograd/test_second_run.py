"""What happens once in a forward pass that runs twice."""

import threading

import pytest

from echelon.nn.autograd.second_run import Tape, TapeEndedError, once


def test_a_second_run_is_given_the_results_of_the_first() -> None:
    tape, numbers = Tape(), iter(range(10))
    with tape.record():
        assert [once(lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]
    with tape.replay():
        assert [once(lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]
    assert once(lambda: next(numbers)) == 3


def test_a_tape_is_replayed_from_its_start_each_time() -> None:
    tape = Tape()
    with tape.record():
        once(lambda: "a")
        once(lambda: "b")
    for _ in range(2):
        with tape.replay():
            assert once(lambda: "c") == "a"


def test_a_second_run_may_be_in_another_thread() -> None:
    tape, found = Tape(), []
    with tape.record():
        once(lambda: 1)

    def run() -> None:
        found.append(once(lambda: 3))
        with tape.replay():
            found.append(once(lambda: 2))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [3, 1]


def test_an_error_ends_a_run() -> None:
    with pytest.raises(ValueError, match="on purpose"), Tape().replay():
        raise ValueError("on purpose")
    assert once(lambda: 1) == 1


def test_a_second_run_cannot_ask_for_more_than_the_first_has_computed() -> None:
    tape = Tape()
    with tape.record():
        once(lambda: 1)
    with tape.replay():
        once(lambda: 1)
        with pytest.raises(TapeEndedError):
            once(lambda: 1)
