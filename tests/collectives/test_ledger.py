"""The ledger adds up, keeps subjects apart and knows what was hidden."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from echelon.collectives import Ledger, TorchGroup, Traffic
from echelon.launching import Ranks
from tests.collectives.shared.real_ranks import wait_until


def test_totals_by_axis_operation_and_subject() -> None:
    ledger = Ledger()
    with ledger.about("gradients"):
        ledger.begin("data", "all_reduce", Traffic(10, 8, 8))
        with ledger.about("metrics"):
            ledger.begin("data", "all_reduce", Traffic(1, 1, 1))
        ledger.begin("tensor", "all_gather", Traffic(5, 2, 3))
    assert ledger.total().payload == 16
    assert ledger.total("data").sent == 9
    assert ledger.total(subject="gradients").received == 11
    assert ledger.total("data", "all_reduce", "metrics").count == 1
    assert ledger.total("pipeline").count == 0
    assert [(row["axis"], row["subject"], row["payload"]) for row in ledger.rows()] == [
        ("data", "gradients", 10),
        ("data", "metrics", 1),
        ("tensor", "gradients", 5),
    ]


def test_a_new_step_forgets_moves_and_keeps_totals() -> None:
    ledger = Ledger()
    ledger.begin("data", "send", Traffic(3, 3, 0))
    ledger.start_step()
    assert ledger.moves == []
    assert ledger.total().payload == 3


def entered(*intervals: tuple[float, float, float, float]) -> Ledger:
    """A ledger of operations, each (start, seconds, start of the wait, seconds of the wait)."""
    ledger = Ledger()
    for start, seconds, wait_start, waited in intervals:
        move = ledger.begin("data", "all_reduce", Traffic(1, 1, 1), start)
        move.seconds, move.wait_start, move.waited = seconds, wait_start, waited
    return ledger


def test_the_moves_of_a_step_stay_as_they_were() -> None:
    ledger = entered((0.0, 1.0, 0.75, 0.25))
    first = ledger.step_moves()
    ledger.begin("data", "all_gather", Traffic(5, 5, 5), 7.0).seconds = 9.0  # after the step
    ledger.start_step()
    assert (first.sent, first.busy(), first.hidden()) == (1, 1.0, 0.75)
    assert ledger.step_moves().sent == 0


def test_overlapping_operations_are_busy_once_and_waiting_is_not_hidden() -> None:
    ledger = entered((0.0, 1.0, 1.0, 0.0), (0.5, 1.0, 1.25, 0.25), (3.0, 0.5, 3.0, 0.5))
    assert ledger.busy() == 2.0
    assert ledger.hidden() == 1.25


def test_a_short_operation_inside_a_long_one_does_not_end_it() -> None:
    """The third begins after the second has ended, but still inside the first."""
    ledger = entered((0.0, 8.0, 8.0, 0.0), (1.0, 1.0, 2.0, 0.0), (4.0, 2.0, 6.0, 0.0), (9.0, 1.0, 9.0, 1.0))
    assert ledger.busy() == 9.0
    assert ledger.hidden() == 8.0


def test_operations_are_counted_in_the_order_of_their_starts() -> None:
    """Threads may enter them in another order."""
    assert entered((2.0, 2.0, 4.0, 0.0), (0.0, 3.0, 3.0, 0.0)).busy() == 4.0


def test_seconds_in_which_two_threads_wait_are_exposed_once() -> None:
    """Both wait from 2 to 3; the second also before that, inside its own operation."""
    ledger = entered((0.0, 3.0, 2.0, 1.0), (0.0, 4.0, 1.0, 2.0))
    assert ledger.busy() == 4.0
    assert ledger.hidden() == 2.0


def test_a_wait_after_the_end_hides_nothing() -> None:
    """The operation ended at 1. A caller that asks for it from 2 to 5 does not wait for communication."""
    ledger = entered((0.0, 1.0, 2.0, 3.0))
    assert ledger.hidden() == ledger.busy() == 1.0


def test_finishing_enters_the_duration_and_the_wait() -> None:
    ledger = Ledger()
    begun = time.perf_counter() - 2.0
    move = ledger.begin("data", "all_reduce", Traffic(1, 1, 1), begun)
    ledger.finish(move, waited_since=time.perf_counter() - 0.5, done=begun + 1.0)
    assert move.seconds == 1.0
    assert 0.5 <= move.waited < 1.0
    assert ledger.total().waited == move.waited


def test_a_ledger_absorbs_the_totals_of_another() -> None:
    ledger, other = entered((0.0, 1.0, 1.0, 0.0)), Ledger()
    other.begin("data", "all_reduce", Traffic(5, 4, 3))
    other.begin("data", "send", Traffic(2, 2, 0))
    ledger.absorb(other)
    assert ledger.total("data", "all_reduce").payload == 6
    assert (ledger.total().count, ledger.total().sent) == (3, 7)
    assert len(ledger.moves) == 1, "single moves stay with the step of their rank"
    assert (other.rows(), other.moves) == ([], [])


def completes_before_the_wait() -> bool:
    """Whether the time of the completion is entered, not the time of the wait."""
    group = TorchGroup("data", dist.group.WORLD, Ledger())  # type: ignore[arg-type]
    handle = group.all_reduce(torch.ones(1000), wait=False)
    work = handle._work
    assert work is not None
    wait_until(lambda: work.done_at() is not None)
    seen = time.perf_counter()
    handle.wait()
    (move,) = group.ledger.moves
    assert move.start + move.seconds <= seen <= move.wait_start
    return group.ledger.hidden() == group.ledger.busy() > 0


def test_an_operation_that_ended_during_other_work_was_not_waited_for(
    warm_ranks: Callable[[int], Ranks],
) -> None:
    assert warm_ranks(2).run(completes_before_the_wait) == [True, True]


def test_what_is_only_about_one_subject_says_nothing_else() -> None:
    ledger = Ledger()
    with ledger.only_about("checks"):
        with ledger.about("parameters"):
            ledger.begin("data", "all_gather", Traffic(8, 4, 4))
        assert ledger.subject == "checks"
    with ledger.about("parameters"):
        ledger.begin("data", "all_gather", Traffic(8, 4, 4))
    assert ledger.total(subject="checks").count == ledger.total(subject="parameters").count == 1
