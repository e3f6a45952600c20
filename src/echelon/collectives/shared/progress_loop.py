"""The progress loop: it advances the operations of a link and receives notices from the peers.

At most one thread at a time runs the loop, and owns it meanwhile:

- A caller that waits runs the loop until its own operation is over, if no other thread does. A blocking
  operation therefore needs no other thread.
- A caller that waits while another thread runs the loop sleeps until its operation is over or the loop is
  free.
- The background thread runs the loop for operations that must advance while their caller does other work,
  whenever no caller runs it. Otherwise it sleeps.

A receive that was posted early need not advance before its caller waits for it. Its peer may wait for that
receive, though, so the background thread polls from time to time.
"""

import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import final

from echelon.collectives.shared.operation_queue import Operation, OperationQueue
from echelon.collectives.shared.peers import PeerSocket
from echelon.launching import PeerLost

_POLL_SECONDS = 0.05  # between polls of the background thread while an operation is unfinished
_IDLE_POLLS = 20  # without an unfinished operation, before the background thread sleeps until it is notified
_JOIN_SECONDS = 1.0  # the background thread ends at once unless the loop's owner is in the middle of a copy


class _Waiter:
    """A thread that sleeps until its operation is over or it may run the loop."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self._gate = threading.Lock()
        self._gate.acquire()

    def sleep(self, seconds: float) -> bool:
        return self._gate.acquire(timeout=max(0.0, seconds))

    def wake(self) -> None:
        if self._gate.locked():
            self._gate.release()


class _Task(Enum):
    """Why the background thread takes the loop."""

    RUN = auto()
    POLL = auto()
    END = auto()


@final
class ProgressLoop:
    """The loop, its owner, and the threads that wait for it. An error in `collectives`, or any error but a
    lost peer, ends everything. A message to or from a lost peer ends only its queue."""

    def __init__(
        self, queues: Sequence[OperationQueue], collectives: OperationQueue, sockets: Sequence[PeerSocket]
    ) -> None:
        self._queues, self._collectives, self._sockets = queues, collectives, sockets
        # Reentrant: garbage collection may run while it is held, and call `close` in the same thread.
        self._lock = threading.RLock()
        self._owner: int | None = None  # the thread that runs the loop
        self._waiters: list[_Waiter] = []
        self._background_call = threading.Condition(self._lock)
        self._is_polling = False  # whether the background thread polls from time to time
        self._failure: Exception | None = None  # why everything ended
        self._process = os.getpid()
        self._wake_descriptor = os.eventfd(0)  # wakes an owner that waits for notices
        self._by_descriptor = {peer.descriptor: peer for peer in sockets}
        self._poller = select.poll()
        for descriptor in (self._wake_descriptor, *self._by_descriptor):
            self._poller.register(descriptor, select.POLLIN)
        self._background_thread = threading.Thread(
            target=self._run_background, name="echelon-shared-memory", daemon=True
        )
        try:
            self._background_thread.start()
        except RuntimeError:  # the system has no thread left
            os.close(self._wake_descriptor)
            raise

    @property
    def is_inherited(self) -> bool:
        """Return whether this is a forked child: without the thread, and with a lock that may be held."""
        return os.getpid() != self._process

    # For callers.

    def submit(self, queue: OperationQueue, operation: Operation) -> Exception | None:
        """Append it to its queue; or return the error that ended the queue."""
        with self._lock:
            if failure := self._failure or queue.failure:
                return failure
            queue.operations.append(operation)
            if self._owner is not None:
                # The owner may sleep in poll() with no notice to come: it must see the new operation.
                os.eventfd_write(self._wake_descriptor, 1)
                return None
            if not queue.starts_at_call:
                return None
            self._owner = threading.get_ident()
        # A send that fits the lane is complete after this one pass: its caller may never wait for it.
        self._run(operation.is_over, deadline=0.0)
        return None

    def wait_for(self, operation: Operation, timeout: float) -> bool:
        """Return when it is over; False if that takes longer than `timeout` seconds."""
        if self.is_inherited:
            raise RuntimeError("a forked child cannot wait for an operation of its parent")
        deadline = time.monotonic() + timeout
        while not operation.is_over():
            if time.monotonic() >= deadline:
                return False
            if waiter := self._take_loop_or_queue(operation):
                self._sleep(waiter, deadline)
            else:
                self._run(operation.is_over, deadline)
        return True

    def poll(self, operation: Operation) -> None:
        """Receive the notices that have arrived, unless another thread runs the loop."""
        if self.is_inherited:
            return
        with self._lock:
            if self._owner is not None or self._failure is not None:
                return
            self._owner = threading.get_ident()
        self._run(operation.is_over, deadline=0.0)

    def run_in_background(self, operation: Operation) -> None:
        """Advance it while its caller does other work."""
        with self._lock:
            operation.is_background = True
            if self._owner is None and (not self._is_polling or self._needs_background()):
                self._background_call.notify()

    def wake_waiters(self, operation: Operation) -> None:
        # Without the lock first, as most operations have no waiter. A waiter that is added just now looks
        # at its operation again before it sleeps.
        if self._waiters:
            with self._lock:
                for waiter in self._waiters:
                    if waiter.operation is operation:
                        waiter.wake()

    def fail(self, error: Exception) -> None:
        """End everything, and let the peers know before any memory that they may be reading is freed."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            # Callers get the error, and then may free tensors that peers read in place: a peer that finds
            # the socket closed after its read throws away what it has read (`Link.read`).
            for peer in self._sockets:
                peer.disconnect()
            os.eventfd_write(self._wake_descriptor, 1)
            self._background_call.notify()

    def close(self) -> None:
        """End the background thread; unfinished operations fail."""
        if self.is_inherited:
            return
        self.fail(PeerLost("the group was closed"))
        # Garbage collection may call this in the thread that runs the loop, which cannot wait for itself.
        if threading.get_ident() not in (self._owner, self._background_thread.ident):
            self._background_thread.join(_JOIN_SECONDS)

    # Ownership of the loop.

    def _take_loop_or_queue(self, operation: Operation) -> _Waiter | None:
        with self._lock:
            # After a failure the loop belongs to the background thread, which fails what is unfinished.
            if self._owner is None and self._failure is None:
                self._owner = threading.get_ident()
                return None
            waiter = _Waiter(operation)
            self._waiters.append(waiter)
            return waiter

    def _sleep(self, waiter: _Waiter, deadline: float) -> None:
        got_loop = False
        try:
            # If it was over before it joined the waiters, it is not woken.
            if not waiter.operation.is_over():
                got_loop = waiter.sleep(deadline - time.monotonic()) and not waiter.operation.is_over()
        finally:
            with self._lock:
                self._waiters.remove(waiter)
                # The offer of a free loop may have woken this thread just as its operation was over: the
                # offer must go on to the next, or all would sleep.
                if not got_loop:
                    self._offer_loop()

    def _offer_loop(self) -> None:
        """Wake a thread that needs the loop, if it is free; under the lock."""
        if self._owner is not None:
            return
        # A waiting caller first: the background thread would do its work one switch of threads later.
        if self._failure is None and self._waiters:
            self._waiters[0].wake()
        elif self._failure is not None or self._needs_background():
            self._background_call.notify()

    def _needs_background(self) -> bool:
        return any(queue.operations and queue.needs_background() for queue in self._queues)

    # For the owner.

    def _run(self, is_enough: Callable[[], bool], deadline: float | None) -> None:
        """Run the loop until it is enough or the deadline has passed, then leave it."""
        try:
            self._advance_all(is_enough, deadline)
        except Exception as error:
            self.fail(error)
        except BaseException:
            # It may have come between two steps that belong together.
            self.fail(RuntimeError("an operation between ranks was interrupted"))
            raise
        finally:
            with self._lock:
                self._owner = None
                self._offer_loop()

    def _advance_all(self, is_enough: Callable[[], bool], deadline: float | None) -> None:
        while self._failure is None:
            # All queues before each sleep: a notice says that a peer is ready, not which operation it serves.
            for queue in self._queues:
                if queue.operations and (error := queue.advance()):
                    self._end_queue(queue, error)
            if is_enough() or not self._receive_notices(deadline):
                return

    def _receive_notices(self, deadline: float | None) -> bool:
        """Wait for notices until the deadline; False if none came."""
        # Rounded up: at 0.4 ms before the deadline a timeout of 0 would spin.
        timeout = None if deadline is None else max(0, math.ceil(1000 * (deadline - time.monotonic())))
        ready = self._poller.poll(timeout)
        for descriptor, _ in ready:
            if descriptor == self._wake_descriptor:
                os.eventfd_read(self._wake_descriptor)
            elif not self._by_descriptor[descriptor].receive():
                # A closed socket is readable forever: poll() would never sleep again.
                self._poller.unregister(descriptor)
        return bool(ready)

    def _end_queue(self, queue: OperationQueue, error: Exception) -> None:
        # Every rank takes part in a collective, so ranks would be out of step from here on. A message has two
        # ends: the other pairs are not concerned.
        if queue is self._collectives or not isinstance(error, PeerLost):
            self.fail(error)
        else:
            with self._lock:
                queue.fail(error)

    # In the background thread.

    def _run_background(self) -> None:
        while (task := self._sleep_until_needed()) is not _Task.END:
            if task is _Task.RUN:
                self._run(self._is_background_done, deadline=None)
            else:
                self._run(lambda: False, deadline=0.0)
        self._end()

    def _sleep_until_needed(self) -> _Task:
        """Take the loop, and return why."""
        num_idle_polls = 0
        with self._lock:
            while self._failure is None:
                if self._owner is None and self._needs_background():
                    self._owner = threading.get_ident()
                    return _Task.RUN
                self._is_polling = num_idle_polls < _IDLE_POLLS
                if self._background_call.wait(_POLL_SECONDS if self._is_polling else None):
                    num_idle_polls = 0
                    continue
                unfinished = any(queue.operations for queue in self._queues)
                num_idle_polls = 0 if unfinished else num_idle_polls + 1
                if unfinished and self._owner is None:
                    self._owner = threading.get_ident()
                    return _Task.POLL
            # The owner may be inside an operation, and copy from memory that `_end` would let go of.
            while self._owner is not None:
                self._background_call.wait()
            self._owner = threading.get_ident()
            return _Task.END

    def _is_background_done(self) -> bool:
        with self._lock:
            return not self._needs_background()

    def _end(self) -> None:
        assert self._failure is not None
        for queue in self._queues:
            queue.fail(self._failure)
        for peer in self._sockets:
            peer.close()
        os.close(self._wake_descriptor)
