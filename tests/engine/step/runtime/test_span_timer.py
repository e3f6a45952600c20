"""When instructions ran: by the host's clock, or by events of a device, which nothing waits for in a step."""

import time

import pytest
import torch

from echelon.collectives.work import EventClock
from echelon.engine.step.runtime.span_timer import HostClock, SpanTimer, clock_of
from echelon.program import Instruction, Op, Span
from tests.collectives.fake_device import FakeDevice, FakeWork

FORWARD = Instruction(Op.FORWARD, microbatch=0)
SEND = Instruction(Op.SEND_ACTIVATION, microbatch=0, peer=1)
RECEIVE = Instruction(Op.RECV_GRADIENT, microbatch=0, peer=1)
BACKWARD = Instruction(Op.BACKWARD, microbatch=0)
STEP = [FORWARD, SEND, RECEIVE, BACKWARD]


def queue_step(timer: SpanTimer, device: FakeDevice) -> None:
    """The host queues a step on a device, and does not wait for it."""
    gradient = FakeWork(device, device.stream.end + 10.0)
    timer.start_step(3, STEP)
    for milliseconds in (2.0, 0.5):
        device.compute(milliseconds)
        timer.finish_instruction()
    gradient.wait()
    timer.finish_instruction()
    device.compute(4.0)
    timer.finish_instruction()


def milliseconds_of(spans: list[Span]) -> list[tuple[float, float]]:
    """Where spans begin and end, from the first one on."""
    begin = spans[0].start
    return [
        (pytest.approx(1e3 * (span.start - begin)), pytest.approx(1e3 * (span.end - begin))) for span in spans
    ]


def test_spans_of_a_device_are_those_of_its_compute_stream() -> None:
    device = FakeDevice()
    before = time.perf_counter()
    timer = SpanTimer(EventClock(device))
    device.compute(100.0)
    queue_step(timer, device)
    spans = timer.spans
    assert [(span.rank, span.instruction) for span in spans] == [(3, instruction) for instruction in STEP]
    assert milliseconds_of(spans) == [(0.0, 2.0), (2.0, 2.5), (2.5, 10.0), (10.0, 14.0)]
    assert before + 0.1 <= spans[0].start <= time.perf_counter() + 0.1, "on the time axis of the host"
    assert timer.spans == spans, "they can be read again"


def test_a_step_waits_for_no_event_and_events_are_reused() -> None:
    device = FakeDevice()
    timer = SpanTimer(EventClock(device))
    queue_step(timer, device)
    synchronized, num_events = device.synchronized, device.num_events
    for _ in range(3):
        queue_step(timer, device)
    assert (device.synchronized, device.num_events, device.now) == (synchronized, num_events, 0.0)
    assert milliseconds_of(timer.spans)[-1] == (10.0, 14.0), "those of the last step"
    assert device.synchronized == synchronized + 1
    queue_step(timer, device)
    assert device.num_events == num_events


def test_spans_that_were_taken_are_read_later_and_no_step_waits_for_it() -> None:
    device = FakeDevice()
    timer = SpanTimer(EventClock(device))
    queue_step(timer, device)
    synchronized = device.synchronized
    taken = timer.take()
    for _ in range(2):
        queue_step(timer, device)
    assert device.synchronized == synchronized
    assert taken is not None
    wanted = [(0.0, 2.0), (2.0, 2.5), (2.5, 10.0), (10.0, 14.0)]
    assert milliseconds_of(taken.read()) == wanted
    assert milliseconds_of(timer.spans) == wanted
    assert taken.read()[-1].end < timer.spans[0].start


def test_durations_stay_exact_in_a_long_run() -> None:
    """CUDA gives the time since an event as float32 milliseconds: after five hours to a millisecond."""
    device = FakeDevice()
    timer = SpanTimer(EventClock(device))
    device.compute(5 * 3600e3 + 0.3)
    queue_step(timer, device)
    assert milliseconds_of(timer.spans)[:2] == [(0.0, 2.0), (2.0, 2.5)]


def test_a_step_that_failed_has_the_spans_of_what_was_done() -> None:
    timer = SpanTimer(HostClock())
    assert timer.spans == []
    before = time.perf_counter()
    timer.start_step(0, STEP)
    timer.finish_instruction()
    (span,) = timer.spans
    assert span.instruction is FORWARD
    assert before <= span.start <= span.end <= time.perf_counter()
    timer.finish_instruction()
    first, second = timer.spans
    assert (first, second.instruction, second.start) == (span, SEND, span.end)


def test_the_clock_of_a_cpu_is_the_host_and_that_of_a_gpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    clock = EventClock(FakeDevice())
    monkeypatch.setattr(
        "echelon.engine.step.runtime.span_timer.cuda_clock", lambda device: {0: clock}[device.index]
    )
    assert clock_of(torch.device("cuda", 0)) is clock
