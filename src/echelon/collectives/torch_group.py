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

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Pending:
        return self._begin(dist.all_reduce, tensor, op=_OPS[op])

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Pending:
        return self._begin(dist.reduce_scatter_tensor, output.view(-1), tensor.view(-1), op=_OPS[op])

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Pending:
        return self._begin(dist.all_gather_into_tensor, _movable(output).view(-1), _movable(tensor).view(-1))

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Pending:
        return self._begin(
            dist.all_to_all_single, _movable(output), _movable(tensor), output_rows, input_rows
        )

    def _broadcast(self, tensor: Tensor, source: int) -> Pending:
        return self._begin(dist.broadcast, _movable(tensor), group_src=source)

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Pending:
        return self._begin(dist.reduce, tensor, group_dst=target, op=_OPS[op])

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Pending:
        parts = None if tensor is None else self._split(tensor)
        return self._begin(dist.scatter, _movable(output).view(-1), parts, group_src=source)

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Pending:
        parts = None if output is None else self._split(output)
        return self._begin(dist.gather, _movable(tensor).view(-1), parts, group_dst=target)

    def _send(self, tensor: Tensor, target: int) -> Pending:
        return self._begin(dist.isend, _movable(tensor), group_dst=target)

    def _recv(self, tensor: Tensor, source: int) -> Pending:
        return self._begin(dist.irecv, _movable(tensor), group_src=source)

    def _barrier(self) -> Pending:
        return self._begin(dist.barrier)

    def _split(self, whole: Tensor) -> list[Tensor]:
        return list(_movable(whole).view(-1).chunk(self.size))

    def _begin(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        if call not in (dist.isend, dist.irecv):
            kwargs["async_op"] = True
        try:
            return _Work(call(*args, group=self.process_group, **kwargs), self)
        except RuntimeError as error:
            raise _explained(error, self) from error


@final
class _Work(Pending):
    """A c10d work object, with the moment of its completion where the backend tells it."""

    def __init__(self, work: dist.Work, group: TorchGroup) -> None:
        self._work, self._group = work, group
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
    return tensor if tensor.dtype in _CARRIED else tensor.view(torch.uint8)
