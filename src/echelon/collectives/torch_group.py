"""A Group over torch.distributed: NCCL between GPUs, Gloo elsewhere."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.group import COMBINE, Group, Reduction
from echelon.collectives.ledger import Ledger
from echelon.collectives.work import HOST_TIMING, EventTiming, Timing, Work, cuda_clock
from echelon.errors import UserError
from echelon.launching import PeerLost
from echelon.launching.group import backends_of
from echelon.launching.watch import pulse
from echelon.launching.watch.failure import is_peer_error

_HOST_BACKENDS = ("gloo", "mpi")
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


class Backend(NamedTuple):
    """A backend of a process group, for the tensors of one type of device."""

    name: str
    runs_on_host: bool  # in threads, which copy from and to a device; else on streams of the device
    waits_on_host: bool  # whether `wait` returns when an operation is complete
    has_urgent_streams: bool  # whether its streams have high priority


def backend_of(group: dist.ProcessGroup, device_type: str, caller: str) -> Backend:
    """Return the backend for tensors of this type of device; `caller` opens the message if there is none."""
    names = backends_of(group)
    if device_type not in names:
        raise UserError(
            f"{caller}: the process group must have a backend for the device of the tensors, got tensors on "
            f"{device_type} and backends {_listed(names)}; move the tensors to {' or '.join(names)}, or "
            f"initialise the group with a backend for both, such as backend='cpu:gloo,cuda:nccl'"
        )
    name = names[device_type]
    runs_on_host = device_type == "cpu" or name in _HOST_BACKENDS
    waits_on_host = runs_on_host or any(_is_set(variable) for variable in _BLOCKING_WAIT)
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    is_urgent = getattr(options, "is_high_priority_stream", False) or _is_set("TORCH_NCCL_HIGH_PRIORITY")
    return Backend(name, runs_on_host, waits_on_host, is_urgent)


def _listed(names: dict[str, str]) -> str:
    return ", ".join(f"{name} for {device}" for device, name in names.items()) or "none"


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "y")


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


class TorchGroup(Group):
    """The ranks of one torch process group."""

    def __init__(self, axis: str, group: dist.ProcessGroup, ledger: Ledger) -> None:
        super().__init__(axis, group.rank(), group.size(), ledger)
        self.process_group = group
        self._place = f"rank {self.rank} of {self.size} along {self.axis}"
        self._scratch = _Scratch()
        self._backends: dict[str, Backend] = {}
        self._side_streams: dict[torch.device, torch.cuda.Stream] = {}

    def waits_on_host(self, device: torch.device) -> bool:
        return self._backend(device.type).waits_on_host

    def moment(self, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
        if device.type != "cuda" or self.waits_on_host(device):
            return nullcontext
        # A receive waits for the stream on which it is called. On a side stream that waits for this event
        # alone, it can begin while the compute stream goes on.
        now = torch.cuda.current_stream(device).record_event()

        def since() -> AbstractContextManager[object]:
            side = self._side(device)
            side.wait_event(now)
            return torch.cuda.stream(side)

        return since

    def has_queue_per_peer(self, device: torch.device) -> bool:
        return self._backend(device.type).runs_on_host

    def connect(self, device: torch.device) -> None:
        if self.size == 1 or self.has_queue_per_peer(device):
            return
        token = torch.zeros(1, device=device)
        pulse.enter_operation(f"connect {self.axis}")
        try:
            self._all_reduce(token, "sum").wait()
            if self.size == 2:
                # Messages have a communicator of their own unless the group is bound to a device, and always
                # a connection of their own in each direction.
                calls = [self._send, self._recv]
                for call in calls if self.rank == 0 else reversed(calls):
                    call(token, 1 - self.rank).wait()
            token.item()  # waits for the device
            if token.is_cuda:
                cuda_clock(token.device)  # synchronises when it is made: here, and not in a step
                self._side(token.device)
        finally:
            pulse.leave_operation()

    def _close(self, *, failed: bool) -> None:
        process_group = self.process_group
        if failed and any(name == "nccl" for name in backends_of(process_group).values()):
            return
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
        return CombinedWork(
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
        flat = _movable(tensor)
        return self._begin(dist.isend, flat.cpu() if self._host_only(flat) else flat, group_dst=target)

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

    def _timing(self, operation: str, tensors: Sequence[Tensor]) -> Timing:
        for device in {tensor.device for tensor in tensors}:
            if not self._backend(device.type, operation).waits_on_host and device.type == "cuda":
                is_message = operation in ("send", "recv")
                return EventTiming(cuda_clock(device), None if is_message else partial(self._side, device))
        return HOST_TIMING

    def _side(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream where completions of this group's collectives are recorded, and receives begin.

        torch hands out the same 32 streams of a priority again and again. One of the other priority than the
        backend's is none on which something is sent.
        """
        if device not in self._side_streams:
            priority = 0 if self._backend(device.type).has_urgent_streams else -1
            self._side_streams[device] = torch.cuda.Stream(device, priority=priority)
        return self._side_streams[device]

    def _backend(self, device_type: str, operation: str = "operations") -> Backend:
        if device_type not in self._backends:
            caller = f"{operation} along {self.axis}"
            self._backends[device_type] = backend_of(self.process_group, device_type, caller)
        return self._backends[device_type]

    def _host_only(self, tensor: Tensor) -> bool:
        """Return whether the backend cannot access this memory: Gloo's messages are in host memory only."""
        return not tensor.is_cpu and self._backend(tensor.device.type).name == "gloo"

    def _over_gloo(self, tensor: Tensor) -> bool:
        return tensor.is_cpu and self._backend("cpu").name == "gloo"

    def _split(self, whole: Tensor) -> list[Tensor]:
        return list(_movable(whole).chunk(self.size))

    def _begin(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Work:
        if call not in (dist.isend, dist.irecv):
            kwargs["async_op"] = True
        # A barrier has no tensors, and its `wait` returns at its completion.
        is_on_host = bool(args) and self._backend(args[0].device.type).runs_on_host
        try:
            # Keeps the tensors alive: a staging buffer must live as long as its message.
            work = call(*args, group=self.process_group, **kwargs)
            return TorchWork(work, args, self._place, is_on_host=is_on_host)
        except RuntimeError as error:
            raise explained(error, self._place) from error


class _Scratch:
    """Reused buffers for incoming parts: new pages for each message would cost as much as the message. It
    keeps a few buffers per type, the largest ones."""

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[Tensor]] = {}
        self._in_use: dict[int, Tensor] = {}

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer as large as `like`, which nothing else uses until `give_back`."""
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


# Gloo moves these types. It moves others as bytes, which can be copied but not reduced.
MOVED_TYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}


def _movable(tensor: Tensor) -> Tensor:
    """Return the same memory, flat, in a type that Gloo moves."""
    flat = tensor.view(-1)
    return flat if tensor.dtype in MOVED_TYPES else flat.view(torch.uint8)


def _rows(tensor: Tensor) -> Tensor:
    """As `_movable`, with the rows that parts are counted in."""
    flat = tensor.view(len(tensor), -1) if tensor.numel() else tensor
    return flat if tensor.dtype in MOVED_TYPES or not tensor.numel() else flat.view(torch.uint8)


@final
class TorchWork(Work):
    """A c10d work object, which keeps its tensors; `place` opens the message when a peer is lost.

    `is_on_host`: it runs in a thread, so a callback tells when it was complete. Over NCCL a callback would
    run at once, on one of torch's 32 streams, which then waits for the operation. That stream may be one of
    another communicator, whose messages would wait too: a deadlock that depends on how many came before.
    """

    def __init__(self, work: dist.Work, tensors: tuple[Any, ...], place: str, *, is_on_host: bool) -> None:
        self._work, self._tensors, self._place = work, tensors, place
        self._done_at: float | None = None
        if is_on_host:
            # Sends, receives and Gloo's reduce-scatter have no future: the return of `wait` counts for them.
            with contextlib.suppress(RuntimeError):
                work.get_future().add_done_callback(self._record_time)

    def _record_time(self, _: Any) -> None:
        self._done_at = time.perf_counter()

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise explained(error, self._place) from error

    def done_at(self) -> float | None:
        return self._done_at

    def done(self) -> bool:
        return self._work.is_completed()  # always False for Gloo's sends and receives


@final
class CombinedWork(Work):
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


def explained(error: RuntimeError, place: str) -> RuntimeError:
    """Return a PeerLost when a peer caused it, so that the launcher looks for the cause in another rank."""
    if is_peer_error(error):
        return PeerLost(f"{place} lost a peer: {error}")
    return error
