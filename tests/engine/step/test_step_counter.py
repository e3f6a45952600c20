"""Numbers of steps: each is used once, and refused steps make no update."""

from echelon.engine.step.step_counter import MOST_SKIPPED, StepCounter
from echelon.update.numbers import Outcome, StepNumbers

GOOD, EMPTY = Outcome(1.0, 1.0, 1.0), Outcome(0.0, 0.0, 0.0)
SKIPPED = Outcome(1.0, 1.0, float("inf"), 1.0, 1.0)


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


def test_a_skipped_step_keeps_its_number_and_is_neither_an_update_nor_an_error() -> None:
    counter = counter_of(GOOD, SKIPPED, GOOD)
    assert counter.late_error() is None
    assert (counter.begun, counter.updates, counter.skipped) == (3, 2, 1)


def test_many_skipped_steps_in_a_row_at_the_smallest_scale_are_an_error() -> None:
    counter = counter_of(*[SKIPPED] * (MOST_SKIPPED - 1))
    assert counter.late_error() is None
    counter.add(StepNumbers.known(SKIPPED))
    assert f"not finite in {MOST_SKIPPED} steps in a row at loss scale 1" in str(counter.late_error())
    assert (counter.begun, counter.skipped) == (MOST_SKIPPED, MOST_SKIPPED)
    assert counter.late_error() is None, "it is raised once"


def test_skipped_steps_from_which_the_scale_still_falls_are_no_error() -> None:
    falling = [SKIPPED._replace(loss_scale=2.0**power) for power in range(3 * MOST_SKIPPED, 0, -1)]
    counter = counter_of(*falling, *[SKIPPED] * (MOST_SKIPPED - 1), GOOD, SKIPPED)
    assert counter.late_error() is None


def test_in_a_pipeline_that_never_drains_a_step_with_a_skipped_update_made_others() -> None:
    counter = StepCounter(skips_steps=False)
    counter.add(StepNumbers.known(SKIPPED))
    assert counter.late_error() is None
    assert (counter.updates, counter.skipped) == (1, 1)
