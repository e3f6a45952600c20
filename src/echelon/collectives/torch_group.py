"""A Group over torch.distributed: NCCL between GPUs, Gloo elsewhere."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.group import Group, Pending, Reduction
from echelon.collectives.ledger import Ledger
from echelon.launching import PeerLost
from echelon.launching.failure import is_peer_error

# torch 2.13 has new names for these two.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_KEPT = 2  # buffers for incoming parts, of each type

_COMBINE: dict[Reduction, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


@final
class TorchGroup(Group):
    """The ranks of one torch process group."""

    def __init__(self, axis: str, group: dist.ProcessGroup, ledger: Ledger) -> None:
        super().__init__(axis, group.rank(), group.size(), ledger)
        self.process_group = group
        self._scratch = _Scratch()

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Pending:
        return self._begin(dist.all_reduce, tensor, op=_OPS[op])

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Pending:
        if not self._over_gloo(tensor):
            return self._begin(_REDUCE_SCATTER, output.view(-1), tensor.view(-1), op=_OPS[op])
        # Everyone sends everyone its part, and each reduces what came: half the time of Gloo's own.
        parts = self._scratch.take(tensor).view(self.size, -1)
        work = self._begin(dist.all_to_all_single, parts.view(-1), tensor.view(-1))
        return Then(work, lambda: self._combine(parts, output.view(-1), op))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Pending:
        if not self._over_gloo(tensor):
            return self._begin(_ALL_GATHER, _movable(output), _movable(tensor))
        # Everyone sends its part straight into its place: half the time of Gloo's own.
        parts = _movable(output).view(self.size, -1)
        if parts[self.rank].data_ptr() != tensor.data_ptr():
            parts[self.rank].copy_(_movable(tensor))
        return _All([self._begin(dist.broadcast, part, group_src=rank) for rank, part in enumerate(parts)])

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Pending:
        return self._begin(dist.all_to_all_single, _rows(output), _rows(tensor), output_rows, input_rows)

    def _broadcast(self, tensor: Tensor, source: int) -> Pending:
        return self._begin(dist.broadcast, _movable(tensor), group_src=source)

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Pending:
        return self._begin(dist.reduce, tensor, group_dst=target, op=_OPS[op])

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Pending:
        parts = None if tensor is None else self._split(tensor)
        return self._begin(dist.scatter, _movable(output), parts, group_src=source)

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Pending:
        parts = None if output is None else self._split(output)
        return self._begin(dist.gather, _movable(tensor), parts, group_dst=target)

    def _send(self, tensor: Tensor, target: int) -> Pending:
        return self._begin(dist.isend, self._reachable(_movable(tensor)), group_dst=target)

    def _recv(self, tensor: Tensor, source: int) -> Pending:
        place = _movable(tensor)
        if not self._host_only(tensor):
            return self._begin(dist.irecv, place, group_src=source)
        incoming = torch.empty_like(place, device="cpu")
        work = self._begin(dist.irecv, incoming, group_src=source)
        return Then(work, lambda: place.copy_(incoming))

    def _barrier(self) -> Pending:
        return self._begin(dist.barrier)

    def _combine(self, parts: Tensor, output: Tensor, op: Reduction) -> None:
        """Reduce the parts that came, in rank order, into `output`."""
        first, second, *others = parts
        _COMBINE[op](first, second, out=output)
        for part in others:
            _COMBINE[op](output, part, out=output)
        if op == "mean":
            output.div_(self.size)
        self._scratch.give_back(parts)

    def _host_only(self, tensor: Tensor) -> bool:
        """Whether the backend cannot reach this memory: Gloo sends and receives from the host's alone."""
        return tensor.is_cuda and dist.get_backend(self.process_group) == "gloo"

    def _reachable(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._host_only(tensor) else tensor

    def _over_gloo(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and dist.get_backend(self.process_group) == "gloo"

    def _split(self, whole: Tensor) -> list[Tensor]:
        return list(_movable(whole).chunk(self.size))

    def _begin(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        if call not in (dist.isend, dist.irecv):
            kwargs["async_op"] = True
        try:
            # The tensors go along: what was staged for this message alone must live as long as it.
            return _Work(call(*args, group=self.process_group, **kwargs), self, args)
        except RuntimeError as error:
            raise _explained(error, self) from error


class _Scratch:
    """Memory for what comes in, kept: taken anew each time, its pages would cost as much as the message.

    A few buffers a type, as large as the largest message; smaller ones give way.
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[Tensor]] = {}
        self._lent: dict[int, Tensor] = {}

    def take(self, like: Tensor) -> Tensor:
        """Memory as large as `like`, which nothing else uses until it is given back."""
        free = self._free.setdefault(like.dtype, [])
        large = [buffer for buffer in free if buffer.numel() >= like.numel()]
        buffer = min(large, key=Tensor.numel) if large else torch.empty(like.numel(), dtype=like.dtype)
        self._free[like.dtype] = [other for other in free if other is not buffer]
        self._lent[buffer.data_ptr()] = buffer
        return buffer[: like.numel()]

    def give_back(self, memory: Tensor) -> None:
        free = self._free[memory.dtype]
        free.append(self._lent.pop(memory.data_ptr()))
        self._free[memory.dtype] = sorted(free, key=Tensor.numel)[-_KEPT:]


@final
class _Work(Pending):
    """A c10d work object, with the moment of its completion where the backend tells it."""

    def __init__(self, work: dist.Work, group: TorchGroup, tensors: tuple[Any, ...]) -> None:
        self._work, self._group, self._tensors = work, group, tensors
        self._done: float | None = None
        # Sends, receives and Gloo's reduce-scatter have no future: there, `wait` tells the time.
        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(self._stamp)

    def _stamp(self, _: Any) -> None:
        self._done = time.perf_counter()

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _explained(error, self._group) from error

    def done_at(self) -> float | None:
        return self._done

    def done(self) -> bool:
        return self._work.is_completed()  # over Gloo, sends and receives tell only those who wait


@final
class _All(Pending):
    """Several at once: complete when the last one is."""

    def __init__(self, several: list[Pending]) -> None:
        self._several = several

    def wait(self) -> None:
        for pending in self._several:
            pending.wait()

    def done_at(self) -> float | None:
        moments = [pending.done_at() for pending in self._several]
        return max((moment for moment in moments if moment is not None), default=None)


@final
class Then(Pending):
    """One, and then something on this rank, which whoever waits does."""

    def __init__(self, pending: Pending, finish: Callable[[], object]) -> None:
        self._pending, self._finish = pending, finish

    def wait(self) -> None:
        self._pending.wait()
        self._finish()

    def in_background(self) -> None:
        self._pending.in_background()

    def done_at(self) -> float | None:
        return None


def _explained(error: RuntimeError, group: Group) -> RuntimeError:
    """A PeerLost when a peer is to blame, so that the launcher looks for the cause elsewhere."""
    if is_peer_error(error):
        return PeerLost(f"rank {group.rank} of {group.size} along {group.axis} lost a peer: {error}")
    return error


# Gloo moves these; anything else travels as bytes (values are only carried, never reduced).
_CARRIED = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
}


def _movable(tensor: Tensor) -> Tensor:
    """The same memory, flat, in a type that can be carried."""
    flat = tensor.view(-1)
    return flat if tensor.dtype in _CARRIED else flat.view(torch.uint8)


def _rows(tensor: Tensor) -> Tensor:
    """As `_movable`, keeping the rows that parts are counted in."""
    flat = tensor.view(len(tensor), -1) if tensor.numel() else tensor
    return flat if tensor.dtype in _CARRIED or not tensor.numel() else flat.view(torch.uint8)
