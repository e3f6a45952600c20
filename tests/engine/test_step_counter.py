"""Numbers of steps: each is used once, and refused steps make no update."""

from echelon.engine.step_counter import StepCounter
from echelon.runtime import Outcome, StepNumbers

GOOD, EMPTY = Outcome(1.0, 1.0, 1.0), Outcome(0.0, 0.0, 0.0)


def counter_of(*outcomes: Outcome) -> StepCounter:
    counter = StepCounter()
    for outcome in outcomes:
        counter.add(StepNumbers.known(outcome))
    return counter


def test_a_refused_step_keeps_its_number_and_is_no_update() -> None:
    # The number after a refused step was used twice: two updates had the same rate and dropped the same.
    counter = counter_of(GOOD, EMPTY, GOOD)
    assert (counter.begun, counter.updates) == (3, 3), "nobody knows yet"
    assert counter.late_error() is not None
    assert (counter.begun, counter.updates) == (3, 2)
    assert counter.late_error() is None, "each error is raised once"


def test_the_last_steps_are_left_for_later() -> None:
    counter = counter_of(GOOD, EMPTY)
    assert counter.late_error(but=1) is None
    counter.add(StepNumbers.known(GOOD))
    assert counter.late_error(but=1) is not None


def test_of_several_refused_steps_all_are_counted_and_the_first_is_told() -> None:
    different = StepNumbers([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])  # a problem
    counter = counter_of(EMPTY)
    counter.add(different)
    assert "no replica had a sample" in str(counter.late_error())
    assert (counter.begun, counter.updates) == (2, 0)
