"""The ledger: the bytes that a rank moved, by axis, operation and subject, and the time that took.

Bytes follow from a rule, not from the backend. `payload` is the whole buffer of the operation;
`sent` and `received` are the least that this rank must move, with N ranks in the group:

    all_reduce      2(N−1)/N · payload each way     (ring: reduce-scatter, then all-gather)
    reduce_scatter   (N−1)/N · payload each way     (payload: the whole input)
    all_gather       (N−1)/N · payload each way     (payload: the whole output)
    all_to_all      the parts for the others / from the others
    broadcast       the source sends payload, the others receive it
    reduce          the others send payload, the target receives it
    scatter, gather the source sends, the target receives, all parts but one
    send, recv      payload
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from echelon.collectives.work import EventTimes


class Traffic(NamedTuple):
    """Bytes of one operation, seen from one rank."""

    payload: int
    sent: int
    received: int


@dataclass(slots=True)
class Move:
    """One operation: begun at `start` (time.perf_counter), done `seconds` later. Its caller waited for
    `waited` seconds, from `wait_start` on."""

    axis: str
    operation: str
    subject: str
    traffic: Traffic
    start: float
    seconds: float = 0.0
    wait_start: float = 0.0
    waited: float = 0.0


@dataclass(slots=True)
class Total:
    """The sum over all moves with one axis, operation and subject."""

    count: int = 0
    payload: int = 0
    sent: int = 0
    received: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, other: "Total") -> None:
        for name in Total.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@final
class StepMoves:
    """The moves of one step. Their bytes are known; reading their times waits for this step alone."""

    def __init__(self, moves: Sequence[Move], read_times: Callable[[], None]) -> None:
        self._moves, self._read_times = moves, read_times

    @property
    def sent(self) -> int:
        """Return the bytes that this rank sent."""
        return sum(move.traffic.sent for move in self._moves)

    def read(self) -> Sequence[Move]:
        """Return the moves, with their times."""
        self._read_times()
        return self._moves

    def busy(self) -> float:
        """Return the seconds in which an operation was unfinished; overlapping ones count once."""
        self._read_times()
        return _covered_seconds((move.start, move.seconds) for move in self._moves)

    def hidden(self) -> float:
        """Return the busy seconds in which no caller waited."""
        self._read_times()
        busy = [(move.start, move.seconds) for move in self._moves]
        waits = [(move.wait_start, move.waited) for move in self._moves]
        return _covered_seconds(busy + waits) - _covered_seconds(waits)


class Ledger:
    """Everything that one rank moved: totals since the start, and each move of the current step.

    Bytes and counts are entered at once. Times of operations on a device are read with
    totals or moves, which waits for the device; or in a later `start_step`, without waiting.
    """

    def __init__(self) -> None:
        self.subject = ""
        self._is_fixed = False  # whether `about` changes nothing
        self._totals: dict[tuple[str, str, str], Total] = defaultdict(Total)
        self._moves: list[Move] = []
        self._unread: deque[EventTimes] = deque()  # of operations on a device
        self._num_deferred = 0  # measurements ever, those of `_unread` last

    @property
    def totals(self) -> dict[tuple[str, str, str], Total]:
        """Return the sums since the start, by axis, operation and subject; wait for a device's operations."""
        self._read_until(self._num_deferred)
        return self._totals

    @property
    def moves(self) -> list[Move]:
        """Return the operations of this step, in the order of their calls; waits for those on a device."""
        self._read_until(self._num_deferred)
        return self._moves

    def step_moves(self) -> StepMoves:
        """Return the operations of this step so far, to be read when later steps have begun; do not wait."""
        return StepMoves(tuple(self._moves), partial(self._read_until, self._num_deferred))

    def start_step(self) -> None:
        """Drop the moves of the previous step; the totals stay. Reads what the device has completed. The rest
        is at most what it has queued, and is read later."""
        while self._unread and self._unread[0].is_complete():
            self._add_times(self._unread.popleft().read())
        self._moves = []

    def about(self, subject: str) -> AbstractContextManager[None]:
        """Operations that begin inside are entered under `subject`: gradients, parameters, metrics …"""
        return _About(self, subject)

    @contextmanager
    def only_about(self, subject: str) -> Iterator[None]:
        """All operations that begin inside are entered under `subject`, whatever they say themselves."""
        with self.about(subject):
            before, self._is_fixed = self._is_fixed, True
            try:
                yield
            finally:
                self._is_fixed = before

    def begin(self, axis: str, operation: str, traffic: Traffic, start: float | None = None) -> Move:
        """Enter an operation that began at `start` (or now)."""
        move = Move(axis, operation, self.subject, traffic, time.perf_counter() if start is None else start)
        self._moves.append(move)
        total = self._totals[axis, operation, self.subject]
        total.count += 1
        total.payload += traffic.payload
        total.sent += traffic.sent
        total.received += traffic.received
        return move

    def finish(self, move: Move, *, waited_since: float, done: float | None = None) -> None:
        """Close a move: the caller waited from `waited_since` until now; complete at `done` (or now)."""
        now = time.perf_counter()
        move.seconds = (now if done is None else done) - move.start
        move.wait_start, move.waited = waited_since, now - waited_since
        self._add_times(move)

    def defer(self, times: "EventTimes") -> None:
        """Close a move whose caller has waited, but whose times are not known yet."""
        self._unread.append(times)
        self._num_deferred += 1

    def busy(self) -> float:
        """Return the seconds of this step in which an operation was unfinished; overlaps count once."""
        return self.step_moves().busy()

    def hidden(self) -> float:
        """Return the busy seconds in which no caller waited."""
        return self.step_moves().hidden()

    def total(
        self, axis: str | None = None, operation: str | None = None, subject: str | None = None
    ) -> Total:
        """Return the sum of the totals that match; None matches all."""
        result = Total()
        for key, part in self.totals.items():
            pairs = zip((axis, operation, subject), key, strict=True)
            if all(wanted in (None, actual) for wanted, actual in pairs):
                result.add(part)
        return result

    def rows(self) -> list[dict[str, str | int | float]]:
        """One plain row for each axis, operation and subject, for tables and JSON."""
        return [
            {"axis": axis, "operation": operation, "subject": subject}
            | {name: getattr(total, name) for name in Total.__slots__}
            for (axis, operation, subject), total in sorted(self.totals.items())
        ]

    def absorb(self, other: "Ledger") -> None:
        """Move the totals of another ledger into this one; that one's moves are dropped."""
        for key, part in other.totals.items():
            self._totals[key].add(part)
        other._totals.clear()
        other.start_step()

    def _read_until(self, number: int) -> None:
        """Read the times of the first `number` measurements ever; the device may be at later ones."""
        while self._num_deferred - len(self._unread) < number:
            self._add_times(self._unread.popleft().read())

    def _add_times(self, move: Move) -> None:
        total = self._totals[move.axis, move.operation, move.subject]
        total.seconds += move.seconds
        total.waited += move.waited


def _covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, each (start, seconds)."""
    covered, end = 0.0, float("-inf")
    for start, seconds in sorted(intervals):
        covered += max(0.0, start + seconds - max(end, start))
        end = max(end, start + seconds)
    return covered


@final
class _About:
    def __init__(self, ledger: Ledger, subject: str) -> None:
        self._ledger, self._subject = ledger, subject

    def __enter__(self) -> None:
        ledger = self._ledger
        self._before = ledger.subject
        if not ledger._is_fixed:
            ledger.subject = self._subject

    def __exit__(self, *_: object) -> None:
        self._ledger.subject = self._before
