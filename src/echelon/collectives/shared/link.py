"""The link: moves whatever the ranks of a group pass each other through shared memory.

An operation is a coroutine that runs until it needs something of a peer. One thread at a time, the *driver*,
runs every operation that can go on, then sleeps until a peer says a word. Whoever waits for an operation
takes the driver's seat if it is free: what is waited for is done by the caller itself, with no other thread.
A thread of the link's own sits there only while there is something to be done in the background.

Three kinds of lines keep order, each by itself, so that a receive nobody has sent for yet holds up no
collective and no other pair:

    collectives     one line: in the order of their calls, the same on every rank
    sends           one line for each target
    receives        one line for each source
"""

import contextlib
import math
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from echelon.collectives.group import Pending
from echelon.collectives.shared.foreign import read_memory
from echelon.collectives.shared.meeting import Meeting
from echelon.collectives.shared.slots import COLLECTIVE, Inbox, Outbox, Word, collective_ring, lane
from echelon.launching import PeerLost

Steps = Coroutine[Any, None, None]

_JOIN_SECONDS = 1.0  # the thread ends at once unless it is in the middle of a copy
_LONGEST_SECONDS = 3600.0  # of one sleep


class Speaker:
    """A peer, and how often it has said each word; `gone` are the peers that were lost, in this order."""

    def __init__(self, rank: int, connection: socket.socket, gone: list[int]) -> None:
        self.rank, self._connection, self._gone = rank, connection, gone
        self._told = [0] * len(Word)
        self._hang_up = select.poll()
        self._hang_up.register(connection, select.POLLRDHUP)

    @property
    def descriptor(self) -> int:
        return self._connection.fileno()

    def tell(self, word: Word, times: int) -> None:
        # Few words are ever unread, since rings are short: this never blocks. One that is gone is found
        # out by `listen`, after all that it had to say.
        with contextlib.suppress(OSError):
            self._connection.send(bytes([word]) * times, socket.MSG_NOSIGNAL)

    def has_told(self, word: Word) -> int:
        return self._told[word]

    def check(self) -> None:
        if self.rank in self._gone:
            first, *others = self._gone
            raise PeerLost(f"rank {first} is gone" + "".join(f", then rank {other}" for other in others))

    def has_hung_up(self) -> bool:
        """Whether it is gone, though perhaps not all that it had said was listened to."""
        return bool(self._hang_up.poll(0))

    def listen(self) -> bool:
        """Take in what it said; False when it is gone."""
        try:
            said = self._connection.recv(4096)
        except ConnectionError:
            said = b""
        for word in Word:
            self._told[word] += said.count(word)
        if not said:
            self._gone.append(self.rank)
        return bool(said)

    def hang_up(self) -> None:
        """Let the peer know, from any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


@final
class Passage(Pending):
    """One operation under way; `where` is for the message when a peer is lost.

    `alone`: unless someone waits for it, it goes on in the background; receives need not.
    """

    def __init__(self, steps: Steps, where: str, link: "Link", *, alone: bool) -> None:
        self._steps, self._where, self._link, self._alone = steps, where, link, alone
        self.error: Exception | None = None
        self._done: float | None = None

    def advance(self) -> bool:
        """Go on as far as possible; whether it is over."""
        try:
            self._steps.send(None)
        except StopIteration:
            self._finish(None)
        except Exception as error:
            self._finish(error)
        return self._done is not None

    def abandon(self, error: Exception) -> None:
        self._steps.close()
        self._finish(error)

    def done(self) -> bool:
        return self._done is not None

    def in_background(self) -> None:
        if self._alone and self._done is None:
            self._link.go_on_with(self)

    def wait(self) -> None:
        if self._done is None:
            self._link.see_through(self, self._where)
        if self.error is not None:
            _raise(self.error, self._where)

    def done_at(self) -> float | None:
        return self._done

    def _finish(self, error: Exception | None) -> None:
        self.error, self._done = error, time.perf_counter()
        self._link.tell_followers()


def _raise(error: Exception, where: str) -> NoReturn:
    if isinstance(error, PeerLost):
        raise PeerLost(f"{where} lost a peer: {error}") from error
    raise error


class Line:
    """Operations that go one after the other; `number` counts those that are over."""

    def __init__(self) -> None:
        self.waiting: deque[Passage] = deque()
        self.number = 0
        self.failure: Exception | None = None

    def advance(self) -> Exception | None:
        """Go on as far as possible; the error of one that failed, behind which nothing may go on."""
        while self.waiting and self.waiting[0].advance():
            self.number += 1
            if error := self.waiting.popleft().error:
                return error
        return None

    def fail(self, error: Exception) -> None:
        self.failure = error
        while self.waiting:
            self.waiting.popleft().abandon(error)


class Link:
    """This rank's ends of all rings between the ranks of a group, and who serves them.

    `timeout` is how many seconds an operation may be waited for. After an error the ranks are out of step,
    and whatever came next would take what was meant for another operation. So the first error ends the link,
    on this rank and thereby on its peers. Only a message to or from a peer that is gone ends just its line.
    """

    def __init__(self, rank: int, meeting: Meeting, timeout: float) -> None:
        self._timeout = timeout
        self.rank, self.size = rank, len(meeting.peers) + 1
        gone: list[int] = []
        self._speakers = {met.rank: Speaker(met.rank, met.socket, gone) for met in meeting.peers}
        self._open_rings(meeting)
        first, second = torch.empty(2, COLLECTIVE.slot_bytes, dtype=torch.uint8, device="cpu")
        self.scratch = (first, second)
        self.can_read = meeting.can_read
        self._processes = {met.rank: met.process for met in meeting.peers}
        self.collectives = Line()
        self.sends = {peer: Line() for peer in self._speakers}
        self.receives = {peer: Line() for peer in self._speakers}
        self._lines = [self.collectives, *self.sends.values(), *self.receives.values()]
        self._seat = threading.Lock()  # the driver's
        # Where threads wait for the seat, or for their operation. Anything may be collected while it is held,
        # and then `close` is called by the same thread.
        self._changed = threading.Condition(threading.RLock())
        self._followers = 0
        self._background: list[Passage] = []  # to go on with though nobody waits
        self._failure: Exception | None = None  # why it ended
        self._process = os.getpid()
        self._wake = os.eventfd(0)
        self._poller = select.poll()
        self._poller.register(self._wake, select.POLLIN)
        self._listened = {speaker.descriptor: speaker for speaker in self._speakers.values()}
        for descriptor in self._listened:
            self._poller.register(descriptor, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="echelon-shared-memory", daemon=True)
        self._thread.start()
        _links.add(self)

    def submit(self, line: Line, steps: Steps, where: str, *, at_once: bool = False) -> Passage:
        """Begin an operation behind the others of its line; raise what ended the line or the link.

        `at_once`: do here and now what can be done of it.
        """
        if os.getpid() != self._process:
            steps.close()
            raise RuntimeError(
                f"{where}: a forked child cannot use the group of its parent, whose thread and sockets it "
                "does not have; use the group in the process that made it"
            )
        with self._changed:
            failure = self._failure or line.failure
            if failure is None:
                passage = Passage(steps, where, self, alone=line not in self.receives.values())
                line.waiting.append(passage)
        if failure is not None:
            steps.close()
            _raise(failure, where)
        if self._seat.locked():  # whoever sits there has not seen it yet
            self._wake_driver()
        elif at_once and self._seat.acquire(blocking=False):
            with self._seated():
                self._advance(line)
        return passage

    def see_through(self, passage: Passage, where: str) -> None:
        """Return when the operation is over: drive, or follow whoever does."""
        end = time.monotonic() + self._timeout
        while not passage.done():
            if self._seat.acquire(blocking=False):
                with self._seated():
                    self._drive(passage.done, end)
            else:
                self._follow(passage, end)
            if not passage.done() and time.monotonic() > end:
                late = PeerLost(f"{where} timed out waiting for its peers after {self._timeout:.0f} seconds")
                self.fail(late)
                raise late

    def go_on_with(self, passage: Passage) -> None:
        """Let an operation go on though nobody waits for it."""
        with self._changed:
            self._background.append(passage)
            self._changed.notify_all()

    def tell_followers(self) -> None:
        """An operation is over, or the driver's seat is free."""
        if self._followers:
            with self._changed:
                self._changed.notify_all()

    def read(self, peer: int, address: int, into: Tensor) -> None:
        """Copy what `peer` has at `address`, where it keeps it until it is told that it was read."""
        unreadable: OSError | None = None
        try:
            read_memory(self._processes[peer], address, into)
        except OSError as error:
            unreadable = error
        if isinstance(unreadable, ProcessLookupError) or self._speakers[peer].has_hung_up():
            raise PeerLost(f"rank {peer} is gone, and its memory with it") from unreadable
        if unreadable is not None:
            raise RuntimeError(
                f"the tensor of rank {peer} was freed or unreadable while in use: {unreadable}"
            ) from unreadable

    def close(self) -> None:
        """End the link; what is still under way fails."""
        if os.getpid() != self._process:
            return  # a forked child, where no thread is and the lock may be held for ever
        self.fail(PeerLost("the process group was destroyed"))
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)

    def fail(self, error: Exception) -> None:
        """End the link, and let the peers know before any memory they may be reading is given back."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = error
            for speaker in self._speakers.values():
                speaker.hang_up()
            self._wake_driver()
            self._changed.notify_all()

    def forget(self) -> None:
        """In a forked child: let go of sockets that would keep this rank alive in the eyes of its peers."""
        for speaker in self._speakers.values():
            speaker.close()

    def _open_rings(self, meeting: Meeting) -> None:
        together = {"wrote": Word.WROTE, "read": Word.READ}
        in_pairs = {"wrote": Word.LANE_WROTE, "read": Word.LANE_READ}
        speakers = self._speakers
        self.outbox = Outbox(collective_ring(meeting.region), list(speakers.values()), **together)
        self.inboxes: dict[int, Inbox] = {}
        self.lanes_out: dict[int, Outbox] = {}
        self.lanes_in: dict[int, Inbox] = {}
        for met in meeting.peers:
            peer, region = met.rank, met.region
            self.inboxes[peer] = Inbox(collective_ring(region), speakers[peer], **together)
            self.lanes_out[peer] = Outbox(lane(meeting.region, peer), [speakers[peer]], **in_pairs)
            self.lanes_in[peer] = Inbox(lane(region, self.rank), speakers[peer], **in_pairs)

    # In the driver's seat.

    @contextlib.contextmanager
    def _seated(self) -> Iterator[None]:
        """Around what the driver does, who has taken the seat."""
        try:
            yield
        except Exception as error:
            self.fail(error)
        finally:
            self._seat.release()
            if self._followers or self._background:
                with self._changed:
                    self._changed.notify_all()

    def _drive(self, until: Callable[[], bool], end: float) -> None:
        """Go on with everything until that is so, or the link has ended, or the time is over."""
        while self._failure is None and not until():
            for line in self._lines:
                if line.waiting:
                    self._advance(line)
            if until():
                return
            left = end - time.monotonic()
            if left <= 0:
                return
            self._listen(left)

    def _advance(self, line: Line) -> None:
        error = line.advance()
        if error is None:
            return
        if line is self.collectives or not isinstance(error, PeerLost):
            self.fail(error)
        else:
            with self._changed:
                line.fail(error)

    def _listen(self, seconds: float) -> None:
        """Take in what peers say, when one does."""
        for descriptor, _ in self._poller.poll(min(seconds, _LONGEST_SECONDS) * 1000):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif not self._listened[descriptor].listen():
                self._poller.unregister(descriptor)

    # Beside it.

    def _wake_driver(self) -> None:
        with contextlib.suppress(OSError):  # all is over already
            os.eventfd_write(self._wake, 1)

    def _follow(self, passage: Passage, end: float) -> None:
        """Sleep until the operation is over, or the seat is free."""
        with self._changed:
            self._followers += 1
            try:
                self._changed.wait_for(
                    lambda: passage.done() or not self._seat.locked(), end - time.monotonic()
                )
            finally:
                self._followers -= 1

    # In the link's own thread.

    def _run(self) -> None:
        while self._failure is None:
            with self._changed:
                self._changed.wait_for(self._is_needed)
            if self._failure is None and self._seat.acquire(blocking=False):
                with self._seated():
                    self._drive(self._is_idle, math.inf)
        self._seat.acquire()
        self._end(self._failure)

    def _is_needed(self) -> bool:
        return self._failure is not None or not (self._is_idle() or self._seat.locked())

    def _is_idle(self) -> bool:
        """Whether all that was to go on in the background is over."""
        if self._background and self._background[0].done():
            with self._changed:
                self._background = [passage for passage in self._background if not passage.done()]
        return not self._background

    def _end(self, failure: Exception) -> None:
        for line in self._lines:
            line.fail(failure)
        for speaker in self._speakers.values():
            speaker.close()
        with self._changed:
            os.close(self._wake)
            self._changed.notify_all()


_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


def _forget_all() -> None:
    for link in _links:
        link.forget()


os.register_at_fork(after_in_child=_forget_all)
