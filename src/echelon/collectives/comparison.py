"""debug=true: the ranks of a group compare what they call before data moves, through a store.

TORCH_DISTRIBUTED_DEBUG=DETAIL compares the operations, sizes and types of collectives. It does not see which
reduction or which source a rank names, nor any message.

[Note: no data moves] A collective is compared when it is called: it returns when all ranks of the group have
called something. A message must not do that: two ranks may send to each other, and receives are posted long
before their message comes. So each end of a message writes down what it calls and then reads what the other
end has written, if it has. The end that writes last finds the note of the first, so a difference is found
before one of the two begins, and no byte moves. The other end compares when it waits.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple, final

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not marked so

from echelon.collectives.work import Work
from echelon.launching.store_agreement import poll_file
from echelon.launching.watch import pulse
from echelon.launching.watch.hang import place_of


class MismatchError(RuntimeError):
    """Two ranks of a group called different operations where they must call the same one."""


_RULE = "all ranks of a group must call the same operations in the same order, with equal sizes and types"
_MESSAGES = ("send", "recv")

_content: ContextVar[str] = ContextVar("content", default="")


def about_content(text: str) -> AbstractContextManager[None]:
    """Messages inside carry this ('activation of microbatch 3 from stage 0'), as both ends must know."""
    return _AboutContent(text)


def current_content() -> str:
    """Return what messages that begin now carry."""
    return _content.get()


@final
class _AboutContent:
    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> None:
        self._token = _content.set(self._text)

    def __exit__(self, *_: object) -> None:
        _content.reset(self._token)


class Call(NamedTuple):
    """An operation that one rank calls; `place` says where it is, and may differ between ranks."""

    operation: str
    axis: str
    dtype: str
    elements: int  # that all ranks must agree on
    detail: str = ""  # 'sum', 'from rank 0'
    rows: Sequence[Sequence[int]] | None = None  # of an all-to-all: from each rank, to each
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
        return cls(*json.loads(data))

    @classmethod
    def of(
        cls,
        operation: str,
        axis: str,
        payload: int,
        tensors: Sequence[Tensor],
        detail: str,
        rows: Sequence[Sequence[int]] | None,
    ) -> "Call":
        """`payload` is in bytes."""
        place = place_of(pulse.read_own()).removeprefix("is ").removesuffix(", ")
        if not tensors:
            return cls(operation, axis, "", 0, detail, rows, place=place)
        first = tensors[0]
        # The parts of an all-to-all have any number of rows, of one size.
        elements = payload // first.element_size() if rows is None else math.prod(first.shape[1:])
        dtype = str(first.dtype).removeprefix("torch.")
        content = current_content() if operation in _MESSAGES else ""
        return cls(operation, axis, dtype, elements, detail, rows, content, place)


@final
class CallComparison:
    """Compares the calls of a rank of a group with those of the others; `ranks` are their global numbers."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._num_collectives = 0
        self._num_messages: dict[str, int] = {}

    def around(self, call: Call, begin: Callable[[], Work], peer: int | None) -> Callable[[], Work]:
        """Return what begins the operation; raise instead if the others are known to call something else."""
        if peer is None:
            self._compare(call)
            return begin
        check = partial(self._check_message, peer)
        message = CheckedMessage(self._store, self._new_key(call, peer), call, check)
        return partial(message.start, begin)

    def _new_key(self, call: Call, peer: int) -> str:
        source, target = (self._rank, peer) if call.operation == "send" else (peer, self._rank)
        way = f"{source}-{target}"
        number = self._num_messages[way] = self._num_messages.get(way, -1) + 1
        return f"message/{way}/{number}"

    def _compare(self, call: Call) -> None:
        """Return when all ranks have called the same; raise on all of them if one has not."""
        number = self._num_collectives
        self._num_collectives += 1
        self._store.set(f"collective/{number}/{self._rank}", call.pack())
        calls = [
            call if rank == self._rank else _read(self._store, f"collective/{number}/{rank}", call)
            for rank in range(len(self._ranks))
        ]
        if number > 0:  # every rank has read this one, since it has called the next
            self._store.delete_key(f"collective/{number - 1}/{self._rank}")
        for rank, other in enumerate(calls):
            if not _is_same(calls[0], other, 0, rank):
                raise MismatchError(self._difference((0, calls[0]), (rank, other)))

    def _check_message(self, peer: int, call: Call, other: Call) -> None:
        if call[2:4] != other[2:4] or call.content != other.content:
            raise MismatchError(self._difference((self._rank, call), (peer, other)))

    def _difference(self, *calls: tuple[int, Call]) -> str:
        sides = ", ".join(f"rank {self._ranks[rank]} calls {call}" for rank, call in calls)
        return f"{sides}: {_RULE}"


@final
class CheckedMessage(Work):
    """This rank's end of a message, which compares itself with the other end once: before `wait` returns."""

    _work: Work

    def __init__(self, store: Store, key: str, call: Call, compare: Callable[[Call, Call], None]) -> None:
        self._store, self._call, self._compare_with = store, call, compare
        self._other = f"{key}/{'recv' if call.operation == 'send' else 'send'}"
        self._is_compared = False
        store.set(f"{key}/{call.operation}", call.pack())  # before the other end is read: see the note
        if self._has_other():
            self._compare()

    def start(self, begin: Callable[[], Work]) -> Work:
        self._work = begin()
        return self

    def _has_other(self) -> bool:
        return self._is_compared or self._store.check([self._other])

    def _compare(self) -> None:
        """Wait until the other end has called; raise if that does not match."""
        if not self._is_compared:
            other = _read(self._store, self._other, self._call)
            self._is_compared = True
            self._store.delete_key(self._other)  # only this end reads it
            self._compare_with(self._call, other)

    def wait(self) -> None:
        self._compare()
        self._work.wait()

    def in_background(self) -> None:
        self._work.in_background()

    def done_at(self) -> float | None:
        return self._work.done_at()

    def done(self) -> bool:
        # A short message may be gone before its receiver has called, for which `wait` would wait.
        return self._work.done() and self._has_other()


def _is_same(first: Call, second: Call, rank: int, other: int) -> bool:
    """Return whether two ranks call the same collective. In an all-to-all, what one sends must be what the
    other expects."""
    if (first.operation, *first[2:5]) != (second.operation, *second[2:5]):
        return False
    if first.rows is None or second.rows is None:
        return first.rows == second.rows
    (from_each, to_each), (others_from_each, others_to_each) = first.rows, second.rows
    return to_each[other] == others_from_each[rank] and from_each[other] == others_to_each[rank]


def _read(store: Store, key: str, call: Call) -> Call:
    """Return what another rank calls, when it has; until then this rank is seen to wait in `call`."""
    before = pulse.read_own()
    pulse.enter_operation(f"compare {call.operation} {call.axis}")
    try:
        poll_file(store, key)
        return Call.unpack(store.get(key))
    finally:
        pulse.leave_operation(back_to=before.name if before.waits else "")
