"""The Group: ranks along one axis, and their operations.

All bytes between ranks go through a Group. So one place checks and counts them, and knows what a rank waits
for. A subclass only moves bytes: it implements the underscored methods, one for each operation.

Ranks are numbered within the group, 0 … size−1. Every operation blocks by default. With `wait=False` it
returns at once, and the caller must call `wait()` of the Handle before it uses the tensors again. With
`overlaps=False` it does so soon: no other thread is woken to advance the operation until then.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, final

import torch
from torch import Tensor

from echelon.collectives.comparison import Call, CallComparison
from echelon.collectives.ledger import Ledger, Move, Traffic
from echelon.collectives.work import HOST_TIMING, Timing, Work
from echelon.launching.watch import pulse

Reduction = Literal["sum", "mean", "min", "max"]

# How two parts are combined; a mean is the sum, divided at the end.
COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


@final
class Handle:
    """The caller's end of an operation. The first `wait()` closes its ledger entry; more are harmless."""

    __slots__ = ("_ledger", "_move", "_timing", "_work")

    def __init__(self, work: Work | None, ledger: Ledger, move: Move | None, timing: Timing) -> None:
        self._work, self._ledger, self._move, self._timing = work, ledger, move, timing

    def wait(self) -> None:
        """Return when the tensors may be used: by the host, or by what it issues on the current stream."""
        work, move = self._work, self._move
        if work is None or move is None:
            return
        pulse.enter_operation(f"{move.operation} {move.axis}")
        try:
            self._timing.wait(work, move, self._ledger)
        finally:
            pulse.leave_operation()
        self._work = self._move = None

    def done(self) -> bool:
        """Return whether it is known to be complete, so that `wait` returns at once."""
        return self._work is None or self._work.done()


class Group(ABC):
    """`size` ranks along `axis`, of which this process is number `rank`."""

    def __init__(self, axis: str, rank: int, size: int, ledger: Ledger) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self.axis, self.rank, self.size, self.ledger = axis, rank, size, ledger
        self.comparison: CallComparison | None = None  # under debug=true
        self.is_closed = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Group":
        """Return this group: a copy of a model uses the ranks of the model."""
        return self

    def close(self, *, failed: bool = False) -> None:
        """Release this rank's process group, threads, sockets and shared memory of the group.

        Any number of times, also when peers are gone. Wait for your operations first: unfinished ones fail,
        here and on the peers, and Gloo returns from its own only when they have ended. Other Group objects
        over the same process group end too. The process group of the world itself stays.

        After a failure (`failed`) communicators of NCCL stay until the process ends: to release one, NCCL
        waits for its operations, which wait for peers that may never come.
        """
        if not self.is_closed:
            self.is_closed = True
            self._close(failed=failed)

    def waits_on_host(self, device: torch.device) -> bool:  # noqa: ARG002
        """Return whether `wait()` of an operation on tensors of `device` returns when it is complete.

        If not (NCCL), only the current stream waits: what the host issues there afterwards sees the result,
        and to read it on the host synchronises with the device.
        """
        return True

    def moment(self, device: torch.device) -> Callable[[], AbstractContextManager[object]]:  # noqa: ARG002
        """Return a context: what is received inside waits for what `device` was given before now, no more."""
        return nullcontext

    def has_queue_per_peer(self, device: torch.device) -> bool:  # noqa: ARG002
        """Return whether messages on tensors of `device` to one peer never hold up those of another. NCCL
        runs all operations of a group in one order, over all peers."""
        return True

    def connect(self, device: torch.device) -> None:  # noqa: B027 (most groups are connected when made)
        """Make now what the first operation on `device` would make, which waits for peers to do the same.

        All ranks must call this, for all their groups in the same order, before a first operation whose
        order ranks do not share: a communicator of NCCL is made by all its ranks together.
        """

    # The same for every kind of group: check, count, begin, wait, measure.

    def all_reduce(
        self, tensor: Tensor, op: Reduction = "sum", *, wait: bool = True, overlaps: bool = True
    ) -> Handle:
        """Reduce all ranks' `tensor`, in place on every rank."""
        share = 2 * (self.size - 1) * tensor.nbytes // self.size
        traffic = Traffic(tensor.nbytes, share, share)
        begin = partial(self._all_reduce, tensor, op)
        return self._do("all_reduce", traffic, wait, begin, tensor, detail=op, overlaps=overlaps)

    def reduce_scatter(
        self,
        output: Tensor,
        tensor: Tensor,
        op: Reduction = "sum",
        *,
        wait: bool = True,
        overlaps: bool = True,
    ) -> Handle:
        """Put part r of the reduction of all ranks' `tensor` into `output` of rank r."""
        self._check_parts("reduce_scatter", whole=tensor, part=output)
        share = tensor.nbytes - output.nbytes
        traffic = Traffic(tensor.nbytes, share, share)
        begin = partial(self._reduce_scatter, output, tensor, op)
        return self._do("reduce_scatter", traffic, wait, begin, output, tensor, detail=op, overlaps=overlaps)

    def all_gather(
        self, output: Tensor, tensor: Tensor, *, wait: bool = True, overlaps: bool = True
    ) -> Handle:
        """Put all ranks' `tensor`, one after the other, into `output` of every rank."""
        self._check_parts("all_gather", whole=output, part=tensor)
        share = output.nbytes - tensor.nbytes
        traffic = Traffic(output.nbytes, share, share)
        begin = partial(self._all_gather, output, tensor)
        return self._do("all_gather", traffic, wait, begin, output, tensor, overlaps=overlaps)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        output_rows: Sequence[int] | None = None,
        input_rows: Sequence[int] | None = None,
        *,
        wait: bool = True,
    ) -> Handle:
        """Rank r's part q of `tensor` becomes rank q's part r of `output`; parts are rows (equal if None)."""
        to_all = self._rows("all_to_all input", tensor, input_rows)
        from_all = self._rows("all_to_all output", output, output_rows)
        traffic = Traffic(
            tensor.nbytes,
            tensor.nbytes - tensor[:1].nbytes * to_all[self.rank],
            output.nbytes - output[:1].nbytes * from_all[self.rank],
        )
        begin, rows = partial(self._all_to_all, output, tensor, from_all, to_all), (from_all, to_all)
        # One rank's parts may all be empty while another's are not, so every rank takes part.
        return self._do("all_to_all", traffic, wait, begin, output, tensor, skip_empty=False, rows=rows)

    def broadcast(self, tensor: Tensor, source: int = 0, *, wait: bool = True) -> Handle:
        """Copy the tensor of `source` into that of every rank."""
        traffic = self._one_way(tensor.nbytes, outgoing=source == self.rank)
        begin = partial(self._broadcast, tensor, source)
        return self._do("broadcast", traffic, wait, begin, tensor, detail=f"from rank {source}")

    def reduce(self, tensor: Tensor, target: int = 0, op: Reduction = "sum", *, wait: bool = True) -> Handle:
        """Reduce all ranks' `tensor` into that of `target`; the others' tensors are undefined."""
        traffic = self._one_way(tensor.nbytes, outgoing=target != self.rank)
        begin = partial(self._reduce, tensor, target, op)
        return self._do("reduce", traffic, wait, begin, tensor, detail=f"{op}, to rank {target}")

    def scatter(
        self, output: Tensor, tensor: Tensor | None = None, source: int = 0, *, wait: bool = True
    ) -> Handle:
        """Put part r of the `tensor` of `source` (None elsewhere) into `output` of rank r."""
        if tensor is not None:
            self._check_parts("scatter", whole=tensor, part=output)
        traffic = self._parts(output, is_root=source == self.rank, outgoing=source == self.rank)
        tensors = [output] if tensor is None else [output, tensor]
        begin = partial(self._scatter, output, tensor, source)
        return self._do("scatter", traffic, wait, begin, *tensors, detail=f"from rank {source}")

    def gather(
        self, tensor: Tensor, output: Tensor | None = None, target: int = 0, *, wait: bool = True
    ) -> Handle:
        """Put all ranks' `tensor`, one after the other, into `output` of `target` (None elsewhere)."""
        if output is not None:
            self._check_parts("gather", whole=output, part=tensor)
        traffic = self._parts(tensor, is_root=target == self.rank, outgoing=target != self.rank)
        tensors = [tensor] if output is None else [tensor, output]
        begin = partial(self._gather, tensor, output, target)
        return self._do("gather", traffic, wait, begin, *tensors, detail=f"to rank {target}")

    def send(self, tensor: Tensor, target: int, *, wait: bool = True) -> Handle:
        """Send to `target`, which must `recv` the same number of elements of the same type."""
        traffic = self._one_way(tensor.nbytes, outgoing=True)
        return self._do("send", traffic, wait, partial(self._send, tensor, target), tensor, peer=target)

    def recv(self, tensor: Tensor, source: int, *, wait: bool = True) -> Handle:
        """Receive from `source` into `tensor`."""
        traffic = self._one_way(tensor.nbytes, outgoing=False)
        return self._do("recv", traffic, wait, partial(self._recv, tensor, source), tensor, peer=source)

    def barrier(self) -> None:
        """Return when every rank of the group has called this."""
        self._do("barrier", Traffic(0, 0, 0), True, self._barrier, skip_empty=False)

    # Different for every kind of group.

    def _close(self, *, failed: bool) -> None:  # noqa: B027 (a group may hold nothing)
        """Release what this kind of group holds."""

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work: ...
    @abstractmethod
    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work: ...
    @abstractmethod
    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work: ...
    @abstractmethod
    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Work: ...
    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int) -> Work: ...
    @abstractmethod
    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Work: ...
    @abstractmethod
    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Work: ...
    @abstractmethod
    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Work: ...
    @abstractmethod
    def _send(self, tensor: Tensor, target: int) -> Work: ...
    @abstractmethod
    def _recv(self, tensor: Tensor, source: int) -> Work: ...
    @abstractmethod
    def _barrier(self) -> Work: ...

    def _do(
        self,
        operation: str,
        traffic: Traffic,
        wait: bool,
        begin: Callable[[], Work],
        *tensors: Tensor,
        skip_empty: bool = True,
        detail: str = "",
        peer: int | None = None,
        rows: tuple[list[int], list[int]] | None = None,
        overlaps: bool = True,
    ) -> Handle:
        if self.is_closed:
            raise RuntimeError(f"{operation} along {self.axis}: the group is closed; make a new engine")
        if self.size > 1:
            check_not_alone(operation, self.axis)
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{operation} along {self.axis}: tensors must be contiguous, got shape "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()}; call .contiguous() first"
                )
        if self.comparison is not None:
            call = Call.of(operation, self.axis, traffic.payload, tensors, detail, rows)
            begin = self.comparison.around(call, begin, peer)
        if skip_empty and traffic.payload == 0:
            return Handle(None, self.ledger, None, HOST_TIMING)
        timing = self._timing(operation, tensors)
        start = time.perf_counter()
        work = begin()
        if self.size == 1:  # nothing leaves this rank, so the ledger has no entry
            work.wait()
            return Handle(None, self.ledger, None, timing)
        move = self.ledger.begin(self.axis, operation, traffic, start)
        handle = Handle(work, self.ledger, move, timing)
        if wait:
            handle.wait()
        else:
            if overlaps:
                work.in_background()
            timing.overlap(work)
        return handle

    def _timing(self, operation: str, tensors: Sequence[Tensor]) -> Timing:  # noqa: ARG002
        """Return how to measure an operation on these tensors; raise if the group cannot move them."""
        return HOST_TIMING

    def _one_way(self, payload: int, *, outgoing: bool) -> Traffic:
        return Traffic(payload, payload if outgoing else 0, 0 if outgoing else payload)

    def _parts(self, part: Tensor, *, is_root: bool, outgoing: bool) -> Traffic:
        payload = self.size * part.nbytes
        share = (self.size - 1 if is_root else 1) * part.nbytes
        return Traffic(payload, share if outgoing else 0, 0 if outgoing else share)

    def _check_parts(self, operation: str, *, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != self.size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{operation} along {self.axis}: the whole must be {self.size} equal parts of one type, got "
                f"{whole.numel()} elements of {whole.dtype} and parts of {part.numel()} of {part.dtype}"
            )

    def _rows(self, name: str, tensor: Tensor, rows: Sequence[int] | None) -> list[int]:
        counts = [tensor.shape[0] // self.size] * self.size if rows is None else list(rows)
        if len(counts) != self.size or sum(counts) != tensor.shape[0]:
            raise ValueError(
                f"{name} along {self.axis}: {tensor.shape[0]} rows must be split into {self.size} parts, "
                f"got {'even parts' if rows is None else counts}"
            )
        return counts


_here = threading.local()  # an update on the host may talk meanwhile


@contextmanager
def alone(reason: str) -> Iterator[None]:
    """Operations with other ranks raise a RuntimeError inside, in this thread."""
    before = getattr(_here, "reason", "")
    _here.reason = reason
    try:
        yield
    finally:
        _here.reason = before


def check_not_alone(operation: str, axis: str) -> None:
    reason = getattr(_here, "reason", "")
    if reason:
        raise RuntimeError(f"{operation} along {axis}: {reason}")
