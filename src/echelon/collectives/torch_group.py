"""A Group over torch.distributed: NCCL between GPUs, Gloo elsewhere."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.group import COMBINE, Group, Reduction, Work
from echelon.collectives.ledger import Ledger
from echelon.launching import PeerLost
from echelon.launching.failure import is_peer_error

# torch 2.13 has new names for these two.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_NUM_KEPT = 2  # buffers for incoming parts, per type

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

    def waits_on_host(self, device: torch.device) -> bool:
        return self.process_group._get_backend(device).name() == "gloo"

    def _close(self) -> None:
        process_group = self.process_group
        del self.process_group, self._scratch  # torch frees a process group with its last reference
        # The world belongs to the launcher. Another Group may have destroyed this one already.
        if dist.is_initialized() and process_group is not dist.group.WORLD:
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(process_group)

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        return self._begin(dist.all_reduce, tensor, op=_OPS[op])

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:
        if not self._over_gloo(tensor):
            return self._begin(_REDUCE_SCATTER, output.view(-1), tensor.view(-1), op=_OPS[op])
        # Every rank sends all others their parts and reduces what it receives: half the time of Gloo's own.
        parts = self._scratch.take(tensor).view(self.size, -1)
        work = self._begin(dist.all_to_all_single, parts.view(-1), tensor.view(-1))
        return ChainedWork(work, lambda: self._combine(parts, output.view(-1), op))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        if not self._over_gloo(tensor):
            return self._begin(_ALL_GATHER, _movable(output), _movable(tensor))
        # Every rank broadcasts its part straight to its place: half the time of Gloo's own.
        parts = _movable(output).view(self.size, -1)
        if parts[self.rank].data_ptr() != tensor.data_ptr():
            parts[self.rank].copy_(_movable(tensor))
        return _CombinedWork(
            [self._begin(dist.broadcast, part, group_src=rank) for rank, part in enumerate(parts)]
        )

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Work:
        return self._begin(dist.all_to_all_single, _rows(output), _rows(tensor), output_rows, input_rows)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._begin(dist.broadcast, _movable(tensor), group_src=source)

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Work:
        return self._begin(dist.reduce, tensor, group_dst=target, op=_OPS[op])

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Work:
        parts = None if tensor is None else self._split(tensor)
        return self._begin(dist.scatter, _movable(output), parts, group_src=source)

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Work:
        parts = None if output is None else self._split(output)
        return self._begin(dist.gather, _movable(tensor), parts, group_dst=target)

    def _send(self, tensor: Tensor, target: int) -> Work:
        return self._begin(dist.isend, self._reachable(_movable(tensor)), group_dst=target)

    def _recv(self, tensor: Tensor, source: int) -> Work:
        destination = _movable(tensor)
        if not self._host_only(tensor):
            return self._begin(dist.irecv, destination, group_src=source)
        incoming = torch.empty_like(destination, device="cpu")
        work = self._begin(dist.irecv, incoming, group_src=source)
        return ChainedWork(work, lambda: destination.copy_(incoming))

    def _barrier(self) -> Work:
        return self._begin(dist.barrier)

    def _combine(self, parts: Tensor, output: Tensor, op: Reduction) -> None:
        """Reduce the received parts, in rank order, into `output`."""
        first, second, *others = parts
        COMBINE[op](first, second, out=output)
        for part in others:
            COMBINE[op](output, part, out=output)
        if op == "mean":
            output.div_(self.size)
        self._scratch.give_back(parts)

    def _host_only(self, tensor: Tensor) -> bool:
        """Whether the backend cannot access this memory: Gloo sends and receives in host memory only."""
        return tensor.is_cuda and dist.get_backend(self.process_group) == "gloo"

    def _reachable(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._host_only(tensor) else tensor

    def _over_gloo(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and dist.get_backend(self.process_group) == "gloo"

    def _split(self, whole: Tensor) -> list[Tensor]:
        return list(_movable(whole).chunk(self.size))

    def _begin(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Work:
        if call not in (dist.isend, dist.irecv):
            kwargs["async_op"] = True
        try:
            # Keeps the tensors alive: a staging buffer must live as long as its message.
            return _TorchWork(call(*args, group=self.process_group, **kwargs), self, args)
        except RuntimeError as error:
            raise _explained(error, self) from error


class _Scratch:
    """Reused buffers for incoming parts: new pages for each message would cost as much as the message.

    It keeps a few buffers per type, the largest ones.
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[Tensor]] = {}
        self._in_use: dict[int, Tensor] = {}

    def take(self, like: Tensor) -> Tensor:
        """A buffer as large as `like`, which nothing else uses until `give_back`."""
        free = self._free.setdefault(like.dtype, [])
        fitting = [buffer for buffer in free if buffer.numel() >= like.numel()]
        buffer = min(fitting, key=Tensor.numel) if fitting else torch.empty(like.numel(), dtype=like.dtype)
        self._free[like.dtype] = [other for other in free if other is not buffer]
        self._in_use[buffer.data_ptr()] = buffer
        return buffer[: like.numel()]

    def give_back(self, memory: Tensor) -> None:
        free = self._free[memory.dtype]
        free.append(self._in_use.pop(memory.data_ptr()))
        self._free[memory.dtype] = sorted(free, key=Tensor.numel)[-_NUM_KEPT:]


@final
class _TorchWork(Work):
    """A c10d work object, with the time of its completion where the backend reports it."""

    def __init__(self, work: dist.Work, group: TorchGroup, tensors: tuple[Any, ...]) -> None:
        self._work, self._group, self._tensors = work, group, tensors
        self._done_at: float | None = None
        # Sends, receives and Gloo's reduce-scatter have no future: the return of `wait` counts for them.
        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(self._record_time)

    def _record_time(self, _: Any) -> None:
        self._done_at = time.perf_counter()

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _explained(error, self._group) from error

    def done_at(self) -> float | None:
        return self._done_at

    def done(self) -> bool:
        return self._work.is_completed()  # always False for Gloo's sends and receives


@final
class _CombinedWork(Work):
    """Several works: complete when the last one is."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def done_at(self) -> float | None:
        times = [work.done_at() for work in self._works]
        return max((time for time in times if time is not None), default=None)


@final
class ChainedWork(Work):
    """A work, and then something on this rank, which `wait` does."""

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        self._work.wait()
        self._finish()

    def in_background(self) -> None:
        self._work.in_background()

    def done_at(self) -> float | None:
        return None


def _explained(error: RuntimeError, group: Group) -> RuntimeError:
    """A PeerLost when a peer caused it, so that the launcher looks for the cause in another rank."""
    if is_peer_error(error):
        return PeerLost(f"rank {group.rank} of {group.size} along {group.axis} lost a peer: {error}")
    return error


# Gloo moves these types. It moves others as bytes, which can be copied but not reduced.
_MOVED_TYPES = {
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
    """The same memory, flat, in a type that Gloo moves."""
    flat = tensor.view(-1)
    return flat if tensor.dtype in _MOVED_TYPES else flat.view(torch.uint8)


def _rows(tensor: Tensor) -> Tensor:
    """As `_movable`, with the rows that parts are counted in."""
    flat = tensor.view(len(tensor), -1) if tensor.numel() else tensor
    return flat if tensor.dtype in _MOVED_TYPES or not tensor.numel() else flat.view(torch.uint8)
