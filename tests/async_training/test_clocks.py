"""Who may start, by literal clocks."""

import math

from echelon.async_training.clocks import Clocks


def clocks(staleness: float, *completed: int) -> Clocks:
    made = Clocks(len(completed), staleness)
    for worker, steps in enumerate(completed):
        if steps:
            made.complete(worker, steps - 1)
    return made


def test_none_starts_more_than_the_bound_ahead_of_the_slowest() -> None:
    assert clocks(2, 5, 3, 4).may_start(0, 5)
    assert not clocks(1, 5, 3, 4).may_start(0, 5)
    assert clocks(1, 5, 3, 4).may_start(1, 3), "the slowest never waits"
    assert clocks(math.inf, 1000, 0).may_start(0, 1000)
    assert clocks(0, 3, 3).may_start(0, 3)
    assert not clocks(0, 3, 2).may_start(0, 3)
    assert clocks(0, 7).may_start(0, 7), "alone there is nobody to wait for"


def test_who_rests_or_is_gone_holds_nobody_up() -> None:
    its = clocks(1, 9, 2, 3)
    its.rest(1)
    assert not its.may_start(0, 9)
    its.leave(2)
    assert its.may_start(0, 9)
    assert its.wake() == {1}
    assert not its.may_start(0, 9)


def test_a_round_awaits_those_who_have_not_made_it() -> None:
    its = clocks(0, 3, 3, 8)
    assert its.awaited(3) == {0, 1}, "worker 2 is further on"
    its.leave(0)
    assert its.awaited(3) == {1}


def test_all_rest_and_all_gone() -> None:
    its = clocks(0, 1, 1)
    its.rest(0)
    assert not its.all_rest
    its.leave(1)
    assert its.all_rest
    assert not its.all_gone
    its.leave(0)
    assert its.all_gone
    assert its.wake() == set()
