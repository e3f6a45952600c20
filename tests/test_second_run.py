"""What happens once in a forward pass that runs twice."""

import threading

import pytest

from echelon.second_run import Tape, is_second_run, once


def test_a_second_run_is_given_the_results_of_the_first() -> None:
    tape, numbers = Tape(), iter(range(10))
    with tape.record():
        assert not is_second_run()
        assert [once(lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]
    with tape.replay():
        assert is_second_run()
        assert [once(lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]
    assert once(lambda: next(numbers)) == 3
    assert not is_second_run()


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
        found.append(is_second_run())
        with tape.replay():
            found.append(once(lambda: 2))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False, 1]


def test_an_error_ends_a_run() -> None:
    with pytest.raises(ValueError, match="on purpose"), Tape().replay():
        raise ValueError("on purpose")
    assert not is_second_run()
