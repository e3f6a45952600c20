"""Work: an operation that a group has begun, and how its times are measured.

The times come from the host's clock, or from events on a CUDA device.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, final

import torch
from torch.cuda import Event

from echelon.collectives.ledger import Ledger, Move


class Work(ABC):
    """An operation that a subclass of Group has begun."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the operation is complete; over NCCL, when the current stream waits for it."""

    def in_background(self) -> None:  # noqa: B027 (most operations advance anyway)
        """Advance it while its caller does other work."""

    def done_at(self) -> float | None:
        """Return when it was complete (time.perf_counter); None if only the return of `wait` is known."""
        return None

    def done(self) -> bool:
        """Return whether it is known to be complete; does not wait."""
        return False


class Timing(ABC):
    """Measures one operation. Make it before the operation is issued."""

    @abstractmethod
    def overlap(self, work: Work) -> None:
        """Note that the operation is issued, and that its caller does other work before it waits."""

    @abstractmethod
    def wait(self, work: Work, move: Move, ledger: Ledger) -> None:
        """Wait for the operation, and enter its times into the ledger, now or later."""


@final
class HostTiming(Timing):
    """For operations whose `wait` returns at completion: the host's clock says all. Has no state."""

    def overlap(self, work: Work) -> None:
        pass

    def wait(self, work: Work, move: Move, ledger: Ledger) -> None:
        since = time.perf_counter()
        work.wait()
        ledger.finish(move, waited_since=since, done=work.done_at())


HOST_TIMING = HostTiming()


# Times of operations that run on a stream of a CUDA device, from events.
#
# The host issues such an operation and goes on. After `wait` it goes on too, because a stream waits and not
# the host, so the host's clock says nothing about the operation. Events are recorded around it:
#
#     compute stream   begin ─ other work ─ before ─ (waits) ─ after ─ work that needs the result
#     stream of NCCL     └───── a collective ─────┐
#     side stream                                 └ done
#
# `begin` is recorded when the operation is issued, and `done` on a side stream that waits for the collective,
# so that the compute stream is not held up. There is no `before` and no `done` where the caller waits at
# once: the compute stream waits from `begin` to `after`.
#
# A send or a receive has no `done`: `after` counts. It may be posted long before its peer posts the other
# end, and a side stream that waits for it can hold up other streams, because a GPU has few hardware queues
# (8, if CUDA_DEVICE_MAX_CONNECTIONS does not say more) and streams share them. If the peer needs what those
# send, no one can go on. A collective cannot wait for what this rank issues later: its ranks run the same
# program.
#
# Nothing here synchronises until the times are read. Events are reused.


_ORIGIN_SECONDS = 1.0  # CUDA gives times as float32 milliseconds: exact to 0.1 µs after a second


class CudaDevice:
    """The calls of CUDA that are used here, for one device; tests have one without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_event(self) -> Event:
        return Event(enable_timing=True)

    def record(self, event: Any) -> None:
        """Record `event` on the current stream."""
        event.record(torch.cuda.current_stream(self._device))

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Make `stream` the current one inside a `with`."""
        return torch.cuda.stream(stream)


@final
class EventClock:
    """Records events on one device, and puts them on the time axis of time.perf_counter.

    All operations of a process on the device share it. To make one synchronises, once: `_origin` is an event
    at a known time. The clocks of host and device drift apart by some microseconds per second.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._free: list[Event] = []
        self._unfinished: list[tuple[Event, Work]] = []
        self._origin = self.record()
        self._origin.synchronize()
        self._origin_seconds = time.perf_counter()

    def record(self) -> Event:
        """Return an event at the end of what the current stream has to do now."""
        try:
            event = self._free.pop()
        except IndexError:
            event = self._device.new_event()
        self._device.record(event)
        return event

    def record_completion(self, work: Work, side_stream: Any) -> Event:
        """Return an event at the completion of `work`; the current stream does not wait for it."""
        with self._device.on_stream(side_stream):
            work.wait()
            return self.record()

    def seconds_at(self, event: Event) -> float:
        """Return when a completed event was, as of time.perf_counter."""
        return self._origin_seconds + _seconds(self._origin, event)

    def read(self, events: Sequence[Event]) -> list[float]:
        """Return when each of these events was, in their order; wait for the last one, and reuse them all."""
        first, last = events[0], events[-1]
        last.synchronize()
        start = self.seconds_at(first)
        seconds = [start + _seconds(first, event) for event in events]
        self.release(*events[:-1])
        self.release_last(last, seconds[-1])
        return seconds

    def release(self, *events: Event) -> None:
        """Reuse events whose times have been read, or will not be."""
        self._free.extend(events)

    def release_last(self, event: Event, seconds: float) -> None:
        """As `release`. If the origin is long ago, `event` becomes the origin, and the old one is reused."""
        if seconds - self._origin_seconds > _ORIGIN_SECONDS:
            event, self._origin, self._origin_seconds = self._origin, event, seconds
        self.release(event)

    def keep_until(self, done: Event, work: Work) -> None:
        """Keep the tensors of an operation that its caller dropped, until it is complete. torch itself keeps
        them until the first wait, and that was the side stream's."""
        self.let_go()
        self._unfinished.append((done, work))

    def let_go(self) -> None:
        """Keep no tensors of operations that are complete."""
        self._unfinished = [pair for pair in self._unfinished if not pair[0].query()]


@final
class EventTiming(Timing):
    """Measures one operation by events; its completion on `side_stream`, if there is one."""

    def __init__(self, clock: EventClock, side_stream: Callable[[], Any] | None) -> None:
        self._clock, self._side_stream = clock, side_stream
        self._overlaps = False
        self._done: Event | None = None
        self._work: Work | None = None  # keeps the tensors until the caller waits
        self._begin = clock.record()

    def overlap(self, work: Work) -> None:
        self._overlaps = True
        if self._side_stream is not None:
            self._done = self._clock.record_completion(work, self._side_stream())
            self._work = work

    def wait(self, work: Work, move: Move, ledger: Ledger) -> None:
        before = self._clock.record() if self._overlaps else None
        work.wait()
        after = self._clock.record()
        ledger.defer(EventTimes(self._clock, move, self._begin, self._done, before, after))
        self._work = None

    def __del__(self) -> None:
        if self._work is not None and self._done is not None:  # its caller did not wait: the step has failed
            self._clock.keep_until(self._done, self._work)


class EventTimes(NamedTuple):
    """The events of an operation that its caller has waited for, as a measurement for the ledger."""

    clock: EventClock
    move: Move
    begin: Event
    done: Event | None
    before: Event | None
    after: Event

    def is_complete(self) -> bool:
        """Return whether `read` would return at once."""
        return self.after.query() and (self.done is None or self.done.query())

    def read(self) -> Move:
        """Return the move, with its times; waits if the device has not come so far."""
        clock, move, begin, after = self.clock, self.move, self.begin, self.after
        after.synchronize()
        end = clock.seconds_at(after)
        move.seconds = move.waited = _seconds(begin, after)
        move.start = end - move.seconds
        if self.before is not None:
            move.waited = _seconds(self.before, after)
            clock.release(self.before)
        if self.done is not None:
            self.done.synchronize()
            move.seconds = _seconds(begin, self.done)
            clock.release(self.done)
        move.wait_start = end - move.waited
        clock.release(begin)
        clock.release_last(after, end)
        return move


def _seconds(start: Event, end: Event) -> float:
    return float(start.elapsed_time(end)) / 1e3


@cache
def cuda_clock(device: torch.device) -> EventClock:
    """Return the clock of a CUDA device in this process; the first call synchronises."""
    return EventClock(CudaDevice(device))
