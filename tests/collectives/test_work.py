"""A group measures an operation by the clock that it runs on."""

import torch

from echelon.collectives import Group, Ledger, Traffic
from echelon.collectives.cuda_timing import EventClock, EventTiming
from echelon.collectives.work import HOST_TIMING, Timing, Work
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
