"""The server as a monitor: threads of one process are its workers."""

import threading
from typing import Any

import pytest
import torch

from echelon.collectives import Ledger
from echelon.launching import PeerLost
from echelon.update.async_training.server import ServerFailed
from echelon.update.update import Push
from tests.update.async_training.serving import Served

pytestmark = pytest.mark.usefixtures("packed")


def test_every_push_is_an_update_of_its_own_mean() -> None:
    served = Served(2, staleness=float("inf"))
    assert served.pull(0, 0) == served.pull(1, 0) == (0, [0.0, 0.0])
    assert served.push(1, 0, 6.0, count=2.0) == (1, 0.0, 2.0, pytest.approx(18**0.5))
    assert served.pull(1, 1) == (1, [-3.0, -3.0])
    served.push(0, 0, 1.0)
    assert served.pull(0, 1) == (2, [-4.0, -4.0])
    assert served.server.log(2) == [Push(1, 0, 0, 1), Push(0, 0, 0, 2)]
    assert served.server.log(1) == [Push(1, 0, 0, 1)]


def test_a_round_is_one_update_weighed_by_counts() -> None:
    served = Served(2, staleness=0)
    first = served.later(served.push, 1, 0, 3.0, 1.0)
    second = served.push(0, 0, 5.0, 3.0)
    assert first.result(1) == second == (1, 0.0, 4.0, pytest.approx(8**0.5))
    assert served.pull(0, 1) == (1, [-2.0, -2.0])
    assert served.server.log(1) == [Push(0, 0, 0, 1), Push(1, 0, 0, 1)]


@pytest.mark.parametrize("user", [0, 1])
def test_a_round_updates_what_any_worker_used(user: int) -> None:
    served = Served(2, staleness=0)
    pushes = [
        served.pool.submit(served.push, worker, 0, 4.0 if worker == user else 0.0, 1.0, worker == user)
        for worker in range(2)
    ]
    assert all(push.result(10).version == 1 for push in pushes)
    assert served.pull(0, 1) == (1, [-2.0, -2.0])


@pytest.mark.parametrize("factors", [(1.0, 0.25), (0.25, 4.0)])
def test_gradients_are_added_as_those_of_loss_totals(factors: tuple[float, float]) -> None:
    """Workers divide losses by counts of their own, and multiply them by loss scales of their own."""
    served = Served(2, staleness=0)
    first = served.later(served.push, 1, 0, 3.0 / factors[1], 1.0, True, factors[1])
    second = served.push(0, 0, 5.0 / factors[0], 3.0, True, factors[0])
    assert first.result(1) == second == (1, 0.0, 4.0, pytest.approx(8**0.5))
    assert served.pull(0, 1) == (1, [-2.0, -2.0])


def test_a_worker_without_samples_does_not_set_the_factor() -> None:
    served = Served(2, staleness=0)
    first = served.later(served.push, 1, 0, 3.0 * 2.0**20, 1.0, True, 2.0**-20)
    served.push(0, 0, 0.0, 0.0, True, 1.0)
    assert first.result(1).norm == pytest.approx(18**0.5)
    assert served.pull(0, 1) == (1, [-3.0, -3.0])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_push_that_overflows_makes_no_version(value: float) -> None:
    served = Served(2, staleness=float("inf"), skips_overflows=True)
    assert served.push(1, 0, value).version == 0
    assert served.pull(1, 1) == (0, [0.0, 0.0])
    assert served.push(0, 0, 1.0).version == 1
    assert served.server.log(1) == [Push(0, 0, 0, 1)], "no entry tells of it"
    unscaled = Served(1, staleness=1)
    assert unscaled.push(0, 0, value).version == 1, "without a loss scale it is applied, as on one device"


def test_clipping_is_by_the_norm_of_the_mean() -> None:
    served = Served(1, staleness=1, clip=1.0)
    served.push(0, 0, 30.0, count=10.0)
    assert torch.tensor(served.pull(0, 1)[1]).norm() == pytest.approx(1.0, rel=1e-5)


def test_a_pull_waits_for_the_slowest_and_then_sees_its_update() -> None:
    served = Served(2, staleness=1)
    served.push(0, 0, 1.0)
    assert served.pull(0, 1)[0] == 1
    served.push(0, 1, 1.0)
    held_back = served.later(served.pull, 0, 2)
    served.push(1, 0, 1.0)
    assert held_back.result(1) == (3, [-3.0, -3.0])


def test_all_synchronize_on_the_same_weights_and_none_starts_before() -> None:
    served = Served(2, staleness=float("inf"))
    first = served.later(served.synchronize, 0)
    served.push(1, 0, 1.0)
    assert served.synchronize(1) == first.result(1) == (1, [-1.0, -1.0])
    for _ in range(50):
        again = [served.pool.submit(served.synchronize, worker) for worker in (0, 1)]
        assert again[0].result(1) == again[1].result(1)


def test_nobody_goes_on_before_all_have_what_they_synchronized_on() -> None:
    """Whoever goes on may wait for a collective on the server's device, where the others' copies are made."""
    served = Served(2, staleness=float("inf"))
    went_on = threading.Event()

    class Slow(torch.Tensor):
        went_on_before = None

        def copy_(self, *_: Any) -> "Slow":
            self.went_on_before = went_on.wait(0.2)
            return self

    into = Slow(2)
    other = served.later(served.server.synchronize, 1, [into])
    served.synchronize(0)
    went_on.set()
    other.result(1)
    assert into.went_on_before is False


def test_resting_ends_a_round_that_would_wait_forever() -> None:
    served = Served(2, staleness=0)
    alone = served.later(served.push, 1, 0, 2.0)
    resting = served.pool.submit(served.synchronize, 0)
    assert alone.result(1).version == 1
    served.synchronize(1)
    assert resting.result(1) == (1, [-2.0, -2.0])


def test_a_push_without_samples_moves_the_clock_and_nothing_else() -> None:
    served = Served(2, staleness=1)
    assert served.push(1, 0, 0.0, count=0.0) == (0, 0.0, 0.0, 0.0)
    assert served.server.log(9) == []
    served.push(0, 0, 1.0)
    served.push(0, 1, 1.0)
    assert served.pull(0, 2)[0] == 2


def test_the_rate_follows_the_version() -> None:
    served = Served(2, staleness=float("inf"), schedule=lambda version: float(version == 1))
    served.push(0, 0, 1.0)
    served.push(1, 0, 5.0)
    served.push(1, 1, 1.0)
    assert served.pull(0, 1) == (3, [-5.0, -5.0])


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        raise ZeroDivisionError("failed on purpose")


def test_an_update_that_fails_fails_everyone() -> None:
    served = Served(2, staleness=1, make=lambda parameters: Broken(parameters, lr=1.0))
    waiting = served.later(served.synchronize, 0)
    with pytest.raises(ZeroDivisionError):
        served.push(1, 0, 1.0)
    for ask in (lambda: waiting.result(1), lambda: served.pull(1, 1), lambda: served.server.log(0)):
        with pytest.raises(ServerFailed, match="ZeroDivisionError: failed on purpose"):
            ask()


def test_a_lost_worker_is_reported_as_that() -> None:
    served = Served(2, staleness=0)
    waiting = served.later(served.push, 0, 0, 1.0)
    served.server.fail(PeerLost("worker 1 is lost"))
    with pytest.raises(PeerLost, match="worker 1 is lost"):
        waiting.result(1)


def test_lingering_ends_with_the_last_goodbye_or_with_patience() -> None:
    served = Served(2, staleness=0)
    served.server.linger(patience=0.01)  # nobody asks for anything
    served.server.leave(0)
    lingering = served.later(served.server.linger, 60.0)
    served.server.leave(1)
    lingering.result(5)


def test_lingering_begins_again_with_every_request() -> None:
    served = Served(2, staleness=0)
    waits: list[float] = []

    def wait_for(_: Any, patience: float) -> bool:
        """As if `patience` had passed; worker 1 has asked for something in the first two."""
        waits.append(patience)
        if len(waits) < 3:
            served.server.count(Ledger())
        return False

    served.server._changed.wait_for = wait_for  # type: ignore[method-assign, assignment]
    served.server.linger(patience=7.0)
    assert waits == [7.0, 7.0, 7.0]


@pytest.mark.parametrize(("staleness", "steps"), [(1, 2), (2, 3), (5, 6)])
def test_a_worker_goes_as_far_ahead_of_a_slow_one_as_the_bound_says(staleness: int, steps: int) -> None:
    served = Served(2, staleness)
    for step in range(steps):
        served.pull(0, step)
        served.push(0, step, 1.0)
    held_back = served.later(served.pull, 0, steps)
    served.push(1, 0, 1.0)
    assert held_back.result(5)[0] == steps + 1


def test_without_a_bound_the_others_go_on_without_the_slow_one() -> None:
    served = Served(2, staleness=float("inf"))
    for step in range(100):
        served.pull(0, step)
        served.push(0, step, 1.0)
    assert served.pull(0, 100) == (100, [-100.0, -100.0])
