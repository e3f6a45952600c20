"""A group measures an operation by the clock that it runs on."""

import gc
import time
import weakref

import pytest
import torch

from echelon.collectives import Group, Ledger, Move, Traffic
from echelon.collectives.work import HOST_TIMING, EventClock, EventTiming, Timing, Work
from tests.collectives.fake_device import FakeDevice, FakeStream, FakeWork
from tests.groups import PartialGroup


class DeviceGroup(PartialGroup):
    """Two ranks whose all-reduce takes five milliseconds on a device."""

    def __init__(self) -> None:
        super().__init__("data", 0, 2, Ledger())
        self.device = FakeDevice()
        self._clock, self._side = EventClock(self.device), FakeStream()

    def _timing(self, operation: str, tensors: object) -> Timing:  # noqa: ARG002
        return EventTiming(self._clock, lambda: self._side)

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Work:  # noqa: ARG002
        return FakeWork(self.device, self.device.stream.end + 5.0)


def test_a_handle_measures_overlap_on_the_device() -> None:
    group = DeviceGroup()
    handle = group.all_reduce(torch.ones(3), wait=False)
    assert group.ledger.total().sent == 12, "bytes are known at once"
    group.device.compute(4.0)
    handle.wait()
    handle.wait()
    group.all_reduce(torch.ones(3))
    overlapped, blocking = group.ledger.moves
    assert [round(1e3 * value, 3) for value in (overlapped.seconds, overlapped.waited)] == [5.0, 1.0]
    assert [round(1e3 * value, 3) for value in (blocking.seconds, blocking.waited)] == [5.0, 5.0]
    assert round(1e3 * group.ledger.busy(), 3) == 10.0
    assert round(1e3 * group.ledger.hidden(), 3) == 4.0


def test_the_host_waits_by_default() -> None:
    group: Group = DeviceGroup()
    assert group.waits_on_host(torch.device("cpu"))
    group.connect(torch.device("cpu"))
    assert group.ledger.rows() == []


def test_the_hosts_clock_counts_until_the_completion_that_the_work_reports() -> None:
    class Reporting(Work):
        def wait(self) -> None:
            pass

        def done_at(self) -> float:
            return move.start + 2.0

    ledger = Ledger()
    move = ledger.begin("data", "send", Traffic(1, 1, 0))
    HOST_TIMING.overlap(Reporting())
    HOST_TIMING.wait(Reporting(), move, ledger)
    assert move.seconds == 2.0
    assert move.wait_start >= move.start
    assert 0 <= move.waited < 2.0


class Rank:
    """One rank's clock, ledger and side stream on a device of its own."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.side = FakeStream()
        self.start = time.perf_counter()
        self.clock = EventClock(self.device)
        self.ledger = Ledger()

    def begin(self) -> Move:
        return self.ledger.begin("data", "all_reduce", Traffic(8, 8, 8))

    def collective(self, takes: float, computes: float | None) -> Move:
        """A collective of some milliseconds, and computation before the wait; None: it waits at once."""
        timing = EventTiming(self.clock, lambda: self.side)
        return self._run(timing, takes, computes)

    def message(self, takes: float, computes: float) -> Move:
        return self._run(EventTiming(self.clock, None), takes, computes)

    def _run(self, timing: EventTiming, takes: float, computes: float | None) -> Move:
        work = FakeWork(self.device, self.device.stream.end + takes)
        move = self.begin()
        if computes is not None:
            timing.overlap(work)
            self.device.compute(computes)
        timing.wait(work, move, self.ledger)
        return move


def milliseconds(*seconds: float) -> list[float]:
    return [pytest.approx(1e3 * value, abs=1e-6) for value in seconds]


@pytest.mark.parametrize(
    ("takes", "computes", "seconds", "waited"),
    [
        (5.0, 3.0, 5.0, 2.0),  # the rest is waited for
        (5.0, 8.0, 5.0, 0.0),  # complete before the wait, which does not count
        (5.0, None, 5.0, 5.0),  # waited for at once
    ],
)
def test_a_collective_lasts_until_its_completion(
    takes: float, computes: float | None, seconds: float, waited: float
) -> None:
    rank = Rank()
    rank.collective(takes, computes)
    (move,) = rank.ledger.moves
    assert [seconds, waited] == milliseconds(move.seconds, move.waited)
    assert [seconds - waited] == milliseconds(rank.ledger.hidden())
    total = rank.ledger.total("data")
    assert (total.seconds, total.waited) == (move.seconds, move.waited)


@pytest.mark.parametrize(("computes", "seconds", "waited"), [(3.0, 5.0, 2.0), (8.0, 8.0, 0.0)])
def test_a_message_lasts_until_the_wait_returns(computes: float, seconds: float, waited: float) -> None:
    """No stream waits for it meanwhile: the hardware may have others wait with that one."""
    rank = Rank()
    rank.message(5.0, computes)
    (move,) = rank.ledger.moves
    assert rank.side.end == 0.0
    assert [seconds, waited] == milliseconds(move.seconds, move.waited)


def test_the_compute_stream_is_not_held_up_by_what_it_does_not_wait_for() -> None:
    rank = Rank()
    timing = EventTiming(rank.clock, lambda: rank.side)
    timing.overlap(FakeWork(rank.device, 5.0))
    assert (rank.device.stream.end, rank.side.end) == (0.0, 5.0)


def test_moves_are_on_the_time_axis_of_the_host() -> None:
    rank = Rank()
    rank.device.compute(100.0)
    rank.collective(5.0, 3.0)
    rank.device.compute(20.0)
    rank.collective(5.0, None)
    first, second = rank.ledger.moves
    assert rank.start + 0.1 <= first.start <= time.perf_counter() + 0.1
    begun = [first.start, first.start + first.seconds, second.start, second.wait_start]
    assert milliseconds(*(value - first.start for value in begun)) == [0.0, 5.0, 25.0, 25.0]
    assert milliseconds(first.wait_start - first.start) == [3.0]


def test_nothing_synchronises_before_someone_asks() -> None:
    rank = Rank()
    at_start = rank.device.synchronized
    for _ in range(3):
        rank.ledger.start_step()
        rank.collective(5.0, 3.0)
        rank.message(5.0, 3.0)
    assert rank.device.synchronized == at_start
    assert rank.device.now == 0.0
    assert rank.ledger.total("data").seconds > 0
    assert rank.device.synchronized > at_start


def test_a_new_step_reads_what_is_complete_and_totals_have_the_rest() -> None:
    rank = Rank()
    rank.collective(5.0, 3.0)
    rank.collective(7.0, 0.0)
    rank.device.now = 5.0
    num_events = rank.device.num_events
    rank.ledger.start_step()
    synchronized = rank.device.synchronized
    rank.collective(1.0, None)
    assert rank.device.num_events == num_events, "those of the first operation are used again"
    assert rank.device.now == 5.0, "the second one is not complete"
    total = rank.ledger.total("data")
    assert (total.count, rank.device.now) == (3, 13.0)
    assert milliseconds(total.seconds, total.waited) == [5.0 + 7.0 + 1.0, 2.0 + 7.0 + 1.0]
    assert rank.device.synchronized > synchronized
    assert len(rank.ledger.moves) == 1


def test_the_times_of_a_step_are_its_own_when_somebody_looks_a_step_later() -> None:
    rank = Rank()
    rank.collective(5.0, 3.0)
    rank.collective(7.0, 0.0)
    synchronized = rank.device.synchronized
    first = rank.ledger.step_moves()
    rank.ledger.start_step()
    rank.collective(100.0, None)
    assert rank.device.synchronized == synchronized, "nobody has looked"
    assert milliseconds(first.busy(), first.hidden()) == [5.0 + 7.0, 3.0]
    assert rank.device.now == 12.0, "and whoever looks does not wait for the step that has begun"
    assert milliseconds(rank.ledger.busy()) == [100.0]
    assert milliseconds(rank.ledger.total().seconds) == [112.0], "every time is counted once"


def test_a_move_without_a_wait_has_no_times_yet() -> None:
    rank = Rank()
    timing = EventTiming(rank.clock, lambda: rank.side)
    work, move = FakeWork(rank.device, 5.0), rank.begin()
    timing.overlap(work)
    assert rank.ledger.moves[0].seconds == 0.0
    timing.wait(work, move, rank.ledger)
    assert milliseconds(rank.ledger.moves[0].seconds) == [5.0]


def test_events_are_reused() -> None:
    rank = Rank()
    for _ in range(2):
        rank.collective(5.0, 3.0)
        rank.message(5.0, 3.0)
        rank.collective(5.0, None)
    rank.ledger.start_step()
    assert rank.ledger.moves == []
    num_events = rank.device.num_events
    for _ in range(50):
        rank.collective(5.0, 3.0)
        rank.collective(5.0, None)
        assert len(rank.ledger.moves) == 2
        rank.ledger.start_step()
    assert rank.device.num_events == num_events


def test_times_stay_exact_in_a_long_run() -> None:
    """CUDA's times are float32 milliseconds: after five hours they would be off by a millisecond."""
    rank = Rank()
    rank.collective(0.25, None)
    first = rank.ledger.moves[0].start
    for _ in range(1100):
        rank.device.compute(16_000.0)
        rank.collective(0.25, None)
        (move, *_) = rank.ledger.moves[-1:]
        rank.ledger.start_step()
    assert move.start - first == pytest.approx(1100 * 16.00025, abs=1e-6)


def test_tensors_of_an_operation_that_no_one_waits_for_are_kept_until_it_is_complete() -> None:
    """As after an error in the middle of a step: torch would give their memory to others at once."""
    rank = Rank()
    tensor = torch.ones(3)
    kept = weakref.ref(tensor)
    timing = EventTiming(rank.clock, lambda: rank.side)
    timing.overlap(FakeWork(rank.device, 5.0, tensor))
    del tensor, timing
    gc.collect()
    assert kept() is not None
    rank.device.now = 5.0
    later = EventTiming(rank.clock, lambda: rank.side)
    later.overlap(FakeWork(rank.device, 9.0))
    del later
    gc.collect()
    assert kept() is None


def test_the_clock_lets_go_of_tensors_whose_operation_is_complete() -> None:
    """It is a device's, and outlives the engine whose last copies nobody waits for."""
    rank = Rank()
    tensor = torch.ones(3)
    kept = weakref.ref(tensor)
    timing = EventTiming(rank.clock, lambda: rank.side)
    timing.overlap(FakeWork(rank.device, 5.0, tensor))
    del tensor, timing
    gc.collect()
    rank.clock.let_go()
    assert kept() is not None
    rank.device.now = 5.0
    rank.clock.let_go()
    assert kept() is None


def test_a_waited_operation_keeps_no_tensor() -> None:
    rank = Rank()
    tensor = torch.ones(3)
    kept = weakref.ref(tensor)
    timing, work = EventTiming(rank.clock, lambda: rank.side), FakeWork(rank.device, 5.0, tensor)
    timing.overlap(work)
    timing.wait(work, rank.begin(), rank.ledger)
    del tensor, work
    assert kept() is None
