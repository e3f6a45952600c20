"""Who may start, by literal clocks."""

import math

from echelon.update.async_training.server import Clocks


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
    assert clocks(0, 7).may_start(0, 7), "a single worker waits for no one"


def test_who_rests_or_is_gone_holds_no_one_up() -> None:
    workers = clocks(1, 9, 2, 3)
    workers.rest(1)
    assert not workers.may_start(0, 9)
    workers.leave(2)
    assert workers.may_start(0, 9)
    assert workers.wake() == {1}
    assert not workers.may_start(0, 9)


def test_a_round_awaits_those_who_have_not_made_it() -> None:
    workers = clocks(0, 3, 3, 8)
    assert workers.awaited(3) == {0, 1}, "worker 2 is further on"
    workers.leave(0)
    assert workers.awaited(3) == {1}


def test_all_rest_and_all_gone() -> None:
    workers = clocks(0, 1, 1)
    workers.rest(0)
    assert not workers.all_rest
    workers.leave(1)
    assert workers.all_rest
    assert not workers.all_gone
    workers.leave(0)
    assert workers.all_gone
    assert workers.wake() == set()
