"""Who moves: at any time at most one thread, the driver, makes operations go on and listens to the peers.

A caller that waits drives until its own operation is over, if nobody else does: what is waited for crosses
no other thread. Who comes while another drives is a follower, and sleeps until its operation is over or the
seat is free. A helper thread drives what shall go on while its caller does other work, when no caller drives;
otherwise it sleeps. What is only expected, such as a receive posted early, need not go on before somebody
waits for it; so that no peer waits for that for ever, the helper has a look every now and then.
"""

import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import final

from echelon.collectives.shared.lines import Line, Passage
from echelon.collectives.shared.speaker import Speaker
from echelon.launching import PeerLost

_LOOK_SECONDS = 0.05  # between the helper's looks while something is unfinished
_QUIET_LOOKS = 20  # without anything unfinished, before the helper sleeps until it is called
_JOIN_SECONDS = 1.0  # the helper ends at once unless somebody is in the middle of a copy


class _Follower:
    """A thread that sleeps until its passage is over or it may drive."""

    def __init__(self, passage: Passage) -> None:
        self.passage = passage
        self._gate = threading.Lock()
        self._gate.acquire()

    def sleep(self, seconds: float) -> bool:
        """Whether it was woken in this time."""
        return self._gate.acquire(timeout=max(0.0, seconds))

    def wake(self) -> None:
        if self._gate.locked():
            self._gate.release()


class _Need(Enum):
    """What the helper takes the seat for."""

    DRIVE = auto()
    LOOK = auto()
    END = auto()


@final
class Drive:
    """The seat of the driver, and those who take it.

    The first error of `all_or_nothing` or of any other kind than a lost peer ends everything; a message to or
    from a peer that is gone ends just its line.
    """

    def __init__(self, lines: Sequence[Line], all_or_nothing: Line, speakers: Sequence[Speaker]) -> None:
        self._lines, self._all_or_nothing, self._speakers = lines, all_or_nothing, speakers
        # Anything may be collected while it is held, and then `close` is called by the same thread.
        self._lock = threading.RLock()
        self._driver: int | None = None  # the thread in the seat
        self._followers: list[_Follower] = []
        self._call = threading.Condition(self._lock)  # for the helper
        self._looks = False  # whether the helper has a look every now and then
        self._failure: Exception | None = None  # why it ended
        self._process = os.getpid()
        self._wake = os.eventfd(0)  # for a driver that listens
        self._by_descriptor = {speaker.descriptor: speaker for speaker in speakers}
        self._poller = select.poll()
        for descriptor in (self._wake, *self._by_descriptor):
            self._poller.register(descriptor, select.POLLIN)
        self._helper = threading.Thread(target=self._help, name="echelon-shared-memory", daemon=True)
        self._helper.start()

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, where no helper is and the lock may be held for ever."""
        return os.getpid() != self._process

    # For callers.

    def submit(self, line: Line, passage: Passage) -> Exception | None:
        """Put it into its line; or the reason why nothing more goes on there."""
        with self._lock:
            if failure := self._failure or line.failure:
                return failure
            line.waiting.append(passage)
            if self._driver is not None:
                os.eventfd_write(self._wake, 1)
                return None
            if not line.at_once:
                return None
            self._driver = threading.get_ident()
        self._drive(passage.is_over, deadline=0.0)
        return None

    def finish(self, passage: Passage, timeout: float) -> bool:
        """Return when it is over; False if that takes longer than `timeout` seconds."""
        if self.is_inherited:
            raise RuntimeError("a forked child cannot wait for an operation of its parent")
        deadline = time.monotonic() + timeout
        while not passage.is_over():
            if time.monotonic() >= deadline:
                return False
            if follower := self._take_seat_or_follow(passage):
                self._follow(follower, deadline)
            else:
                self._drive(passage.is_over, deadline)
        return True

    def look(self, passage: Passage) -> None:
        """Take in what the peers have said, unless somebody does."""
        if self.is_inherited:
            return
        with self._lock:
            if self._driver is not None or self._failure is not None:
                return
            self._driver = threading.get_ident()
        self._drive(passage.is_over, deadline=0.0)

    def go_on_behind(self, passage: Passage) -> None:
        """Make it go on while its caller does other work."""
        with self._lock:
            passage.behind = True
            if self._driver is None and (not self._looks or self._wants_helper()):
                self._call.notify()

    def over(self, passage: Passage) -> None:
        """Wake those who wait for it."""
        if self._followers:
            with self._lock:
                for follower in self._followers:
                    if follower.passage is passage:
                        follower.wake()

    def fail(self, error: Exception) -> None:
        """End everything, and let the peers know before any memory they may be reading is given back."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            for speaker in self._speakers:
                speaker.hang_up()
            os.eventfd_write(self._wake, 1)
            self._call.notify()

    def close(self) -> None:
        """End the helper; what is still under way fails."""
        if self.is_inherited:
            return
        self.fail(PeerLost("the process group was destroyed"))
        if threading.get_ident() not in (self._driver, self._helper.ident):
            self._helper.join(_JOIN_SECONDS)

    # The seat.

    def _take_seat_or_follow(self, passage: Passage) -> _Follower | None:
        with self._lock:
            if self._driver is None and self._failure is None:
                self._driver = threading.get_ident()
                return None
            follower = _Follower(passage)
            self._followers.append(follower)
            return follower

    def _follow(self, follower: _Follower, deadline: float) -> None:
        offered = False
        try:
            # Over before it was among the followers: then nobody wakes it.
            if not follower.passage.is_over():
                offered = follower.sleep(deadline - time.monotonic()) and not follower.passage.is_over()
        finally:
            with self._lock:
                self._followers.remove(follower)
                if not offered:
                    self._hand_on()

    def _leave_seat(self) -> None:
        with self._lock:
            self._driver = None
            self._hand_on()

    def _hand_on(self) -> None:
        """Offer a free seat to who needs it; under the lock."""
        if self._driver is not None:
            return
        if self._failure is None and self._followers:
            self._followers[0].wake()
        elif self._failure is not None or self._wants_helper():
            self._call.notify()

    def _wants_helper(self) -> bool:
        return any(line.waiting and line.wants_background() for line in self._lines)

    # In the seat.

    def _drive(self, enough: Callable[[], bool], deadline: float | None) -> None:
        """Go on until it is enough or the deadline has passed, and leave the seat."""
        try:
            self._go_on(enough, deadline)
        except Exception as error:
            self.fail(error)
        except BaseException:
            # Somewhere between two steps that belong together.
            self.fail(RuntimeError("an operation between ranks was interrupted"))
            raise
        finally:
            self._leave_seat()

    def _go_on(self, enough: Callable[[], bool], deadline: float | None) -> None:
        while self._failure is None:
            for line in self._lines:
                if line.waiting and (error := line.advance()):
                    self._stop(line, error)
            if enough() or not self._listen(deadline):
                return

    def _listen(self, deadline: float | None) -> bool:
        """Take in what peers say, at the latest when the deadline has passed: then False."""
        patience = None if deadline is None else max(0, math.ceil(1000 * (deadline - time.monotonic())))
        heard = self._poller.poll(patience)
        for descriptor, _ in heard:
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif not self._by_descriptor[descriptor].listen():
                self._poller.unregister(descriptor)
        return bool(heard)

    def _stop(self, line: Line, error: Exception) -> None:
        if line is self._all_or_nothing or not isinstance(error, PeerLost):
            self.fail(error)
        else:
            with self._lock:
                line.fail(error)

    # In the helper's thread.

    def _help(self) -> None:
        while (need := self._sleep_until_needed()) is not _Need.END:
            if need is _Need.DRIVE:
                self._drive(self._is_enough, deadline=None)
            else:
                self._drive(lambda: False, deadline=0.0)
        self._end()

    def _sleep_until_needed(self) -> _Need:
        """Take the seat, and say for what."""
        quiet = 0
        with self._lock:
            while self._failure is None:
                if self._driver is None and self._wants_helper():
                    self._driver = threading.get_ident()
                    return _Need.DRIVE
                self._looks = quiet < _QUIET_LOOKS
                if self._call.wait(_LOOK_SECONDS if self._looks else None):
                    quiet = 0
                    continue
                unfinished = any(line.waiting for line in self._lines)
                quiet = 0 if unfinished else quiet + 1
                if unfinished and self._driver is None:
                    self._driver = threading.get_ident()
                    return _Need.LOOK
            while self._driver is not None:
                self._call.wait()
            self._driver = threading.get_ident()
            return _Need.END

    def _is_enough(self) -> bool:
        with self._lock:
            return not self._wants_helper()

    def _end(self) -> None:
        assert self._failure is not None
        for line in self._lines:
            line.fail(self._failure)
        for speaker in self._speakers:
            speaker.close()
        os.close(self._wake)
