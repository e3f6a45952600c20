"""debug=true: the ranks of a group compare what they call before data moves, through a store.

[Note: who waits for whom] A collective is compared when it is called: it returns when all ranks of the group
have called something. A message must not do that, since two ranks may send to each other, and receives are
posted long before their message comes. So a sender writes down what it calls, begins, and goes on. The
receiver reads that note when it waits, answers with its own, and only then begins to receive. The sender
reads the answer when it waits for its message, mostly at the end of a step.

Without debug=true a posted receive takes its message whatever its rank does next. So that the same programs
end here, a rank that waits for any note begins meanwhile, in all its groups, the posted receives whose
senders have called. What a rank waits for then depends on calls of others alone, as it does over Gloo: never
on which of several waits another rank is in.

Receives begin in the order of their calls. Where messages of all peers share one order (NCCL), they also
begin before a send or a collective that is called after them, as that runs after them anyway.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not marked so

from echelon.collectives.mismatch import MismatchError
from echelon.collectives.work import Work
from echelon.launching.watch import pulse
from echelon.launching.watch.hang import place_of

_RULE = "all ranks of a group must call the same operations in the same order, with equal sizes and types"
_MESSAGES = ("send", "recv")
_PAUSE = 0.0005  # seconds between two looks at what others have called

_content: ContextVar[str] = ContextVar("content", default="")


@contextmanager
def about_content(text: str) -> Iterator[None]:
    """Messages inside carry this ('activation of microbatch 3 from stage 0'), as both ends must know."""
    token = _content.set(text)
    try:
        yield
    finally:
        _content.reset(token)


class Call(NamedTuple):
    """What one rank calls; `place` says where it is, and need not be the same on all ranks."""

    operation: str
    axis: str
    dtype: str
    elements: int  # that all ranks must agree on
    detail: str = ""  # 'sum', 'from rank 0'
    rows: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of an all-to-all: from each rank, to each
    content: str = ""
    place: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        size = f" of {self.elements:,} {self.dtype}" if self.dtype else ""
        rows = ""
        if self.rows is not None:
            rows = f" a row, {list(self.rows[1])} rows to the ranks and {list(self.rows[0])} from them,"
        content = f", {self.content}," if self.content else ""
        place = f" ({self.place})" if self.place else ""
        return f"{self.operation}{detail}{size}{rows}{content} along {self.axis}{place}"

    def pack(self) -> str:
        return json.dumps(self)

    @classmethod
    def unpack(cls, data: bytes) -> "Call":
        fields = json.loads(data)
        rows = fields[5]
        fields[5] = None if rows is None else (tuple(rows[0]), tuple(rows[1]))
        return cls(*fields)

    @classmethod
    def of(
        cls,
        operation: str,
        axis: str,
        payload: int,
        tensors: Sequence[Tensor],
        detail: str,
        rows: tuple[Sequence[int], Sequence[int]] | None,
    ) -> "Call":
        """`payload` is in bytes."""
        place = place_of(pulse.read_own()).removeprefix("is ").removesuffix(", ")
        both = None if rows is None else (tuple(rows[0]), tuple(rows[1]))
        if not tensors:
            return cls(operation, axis, "", 0, detail, both, place=place)
        first = tensors[0]
        # The parts of an all-to-all have any number of rows, of one size.
        elements = payload // first.element_size() if rows is None else math.prod(first.shape[1:])
        dtype = str(first.dtype).removeprefix("torch.")
        content = _content.get() if operation in _MESSAGES else ""
        return cls(operation, axis, dtype, elements, detail, both, content, place)


@final
class CallComparison:
    """Compares the calls of a rank of a group with those of the others; `ranks` are their global numbers."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], *, queue_per_peer: bool) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._queue_per_peer = queue_per_peer
        self._num_collectives = 0
        self._num_messages: dict[str, int] = {}
        self._posted: dict[int, deque[PostedReceive]] = {}  # not begun, by the queue that they are in

    def close(self) -> None:
        """Begin no more receives: the group is closed."""
        for queue in self._posted.values():
            queue.clear()
        _queues[:] = [queue for queue in _queues if queue]

    def around(
        self, call: Call, begin: Callable[[], Work], peer: int | None, *tensors: Tensor
    ) -> Callable[[], Work]:
        """What begins the operation, and lets its data move only if the others call the same."""
        if not self._queue_per_peer and call.operation != "recv":
            self._begin_posted(0)
        if peer is None:
            self._compare(call)
            return begin
        if call.operation == "send":
            return self._around_send(call, begin, peer)
        return self._around_receive(call, begin, peer, *tensors)

    def _around_send(self, call: Call, begin: Callable[[], Work], peer: int) -> Callable[[], Work]:
        key = self._new_key(self._rank, peer)
        answer = f"{key}/recv"
        self._store.set(f"{key}/send", call.pack())

        def check() -> None:
            self._check_message(call, peer, self._take(call, answer))

        return lambda: CheckedSend(begin(), check, lambda: self._store.check([answer]))

    def _around_receive(
        self, call: Call, begin: Callable[[], Work], peer: int, *tensors: Tensor
    ) -> Callable[[], Work]:
        key = self._new_key(peer, self._rank)
        note, answer = f"{key}/send", f"{key}/recv"
        if call.elements == 0:  # such a receive is never waited for
            self._store.set(answer, call.pack())
        queue = self._posted.setdefault(peer if self._queue_per_peer else 0, deque())

        def check() -> None:
            other = self._take(call, note, queue)
            self._store.set(answer, call.pack())
            self._check_message(call, peer, other)

        receive = PostedReceive(begin, check, lambda: self._store.check([note]), queue, _stream_of(*tensors))
        return lambda: self._post(receive)

    def _post(self, receive: "PostedReceive") -> Work:
        receive.queue.append(receive)
        if not any(queue is receive.queue for queue in _queues):
            _queues.append(receive.queue)
        return receive

    def _begin_posted(self, queue: int) -> None:
        while posted := self._posted.get(queue):
            posted[0].begin()

    def _new_key(self, source: int, target: int) -> str:
        way = f"{source}-{target}"
        number = self._num_messages[way] = self._num_messages.get(way, -1) + 1
        return f"message/{way}/{number}"

    def _compare(self, call: Call) -> None:
        """Return when all ranks have called the same; raise on all of them if one has not."""
        number = self._num_collectives
        self._num_collectives += 1
        self._store.set(f"collective/{number}/{self._rank}", call.pack())
        with _waiting(call):
            calls = [
                call if rank == self._rank else Call.unpack(self._await(f"collective/{number}/{rank}"))
                for rank in range(len(self._ranks))
            ]
        if number > 0:  # every rank has read this one, since it has called the next
            self._store.delete_key(f"collective/{number - 1}/{self._rank}")
        for rank, other in enumerate(calls):
            if not _is_same(calls[0], other, 0, rank):
                raise MismatchError(self._difference((0, calls[0]), (rank, other)))

    def _take(self, call: Call, key: str, queue: "deque[PostedReceive] | None" = None) -> Call:
        """What the other end of a message calls, when it has; `queue` is that of the receive `call`."""
        with _waiting(call):
            other = Call.unpack(self._await(key, queue))
        self._store.delete_key(key)
        return other

    def _await(self, key: str, own: "deque[PostedReceive] | None" = None) -> bytes:
        """What is under `key`, when it is there. Until then receives of all queues but `own` may begin."""
        limit = self._store.timeout  # type: ignore[attr-defined]  # not in torch's stub
        end = time.monotonic() + limit.total_seconds()
        while _can_begin(own) and not self._store.check([key]) and time.monotonic() < end:
            _begin_what_has_come(own)
            time.sleep(_PAUSE)
        return self._store.get(key)

    def _check_message(self, call: Call, peer: int, other: Call) -> None:
        if call[2:4] != other[2:4] or call.content != other.content:
            raise MismatchError(self._difference((self._rank, call), (peer, other)))

    def _difference(self, *calls: tuple[int, Call]) -> str:
        sides = ", ".join(f"rank {self._ranks[rank]} calls {call}" for rank, call in calls)
        return f"{sides}: {_RULE}"


@final
class CheckedSend(Work):
    """A message that was begun; what its receiver calls is compared when it is waited for.

    `is_received`: the receiver has answered. A short message may be gone before that.
    """

    def __init__(self, work: Work, check: Callable[[], None], is_received: Callable[[], bool]) -> None:
        self._work, self._check, self._is_received = work, check, is_received

    def wait(self) -> None:
        self._check()
        self._work.wait()

    def in_background(self) -> None:
        self._work.in_background()

    def done_at(self) -> float | None:
        return self._work.done_at()

    def done(self) -> bool:
        return self._work.done() and self._is_received()


@final
class PostedReceive(Work):
    """A receive that begins when its rank waits for it, or for anything else once the sender has called
    (`has_come`); and if the sender's call matches."""

    def __init__(
        self,
        begin: Callable[[], Work],
        check: Callable[[], None],
        has_come: Callable[[], bool],
        queue: "deque[PostedReceive]",
        stream: Any | None,
    ) -> None:
        self._begin, self._check, self.has_come = begin, check, has_come
        self.queue, self._stream = queue, stream
        self._work: Work | None = None
        self.error: MismatchError | None = None

    def begin(self) -> None:
        """Begin the receive, which is the first in its queue: as if on the stream that it was called on."""
        assert self.queue[0] is self
        if self.error is not None:  # it was found while this rank waited for something else
            raise self.error
        try:
            self._check()
        except MismatchError as error:
            self.error = error
            raise
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._work = self._begin()
        self.queue.popleft()

    def wait(self) -> None:
        while self._work is None:
            self.queue[0].begin()
        self._work.wait()

    def done_at(self) -> float | None:
        return None if self._work is None else self._work.done_at()

    def done(self) -> bool:
        return self._work is not None and self._work.done()


# Of all groups: the queues of receives that are posted, and may not have begun.
_queues: list[deque[PostedReceive]] = []


def _can_begin(own: deque[PostedReceive] | None) -> bool:
    return any(queue and queue is not own and queue[0].error is None for queue in _queues)


def _begin_what_has_come(own: deque[PostedReceive] | None) -> None:
    for queue in _queues:
        if queue and queue is not own and queue[0].error is None and queue[0].has_come():
            queue[0].begin()


def _is_same(first: Call, second: Call, rank: int, other: int) -> bool:
    """Whether two ranks call the same collective; in an all-to-all, whether what one sends is what the other
    expects."""
    if (first.operation, *first[2:5]) != (second.operation, *second[2:5]):
        return False
    if first.rows is None or second.rows is None:
        return first.rows == second.rows
    (from_each, to_each), (others_from_each, others_to_each) = first.rows, second.rows
    return to_each[other] == others_from_each[rank] and from_each[other] == others_to_each[rank]


def _stream_of(*tensors: Tensor) -> Any | None:
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return torch.cuda.current_stream(devices.pop()) if devices else None


@contextmanager
def _waiting(call: Call) -> Iterator[None]:
    """A rank that waits here for others is seen to do so; then, to be in the operation that it was in."""
    before = pulse.read_own()
    pulse.enter_operation(f"compare {call.operation} {call.axis}")
    try:
        yield
    finally:
        pulse.leave_operation(back_to=before.name if before.waits else "")
