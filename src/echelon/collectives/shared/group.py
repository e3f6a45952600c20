"""A Group whose CPU tensors go through shared memory, and the choice of it."""

import weakref
from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.backend import backends_of
from echelon.collectives.group import Group, Reduction
from echelon.collectives.ledger import Ledger
from echelon.collectives.shared import operations
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.operation_queue import OperationQueue, Steps
from echelon.collectives.shared.rendezvous import open_link
from echelon.collectives.timing import HOST_TIMING, Timing
from echelon.collectives.torch_group import TorchGroup
from echelon.collectives.torch_work import ChainedWork
from echelon.collectives.work import Work

_REDUCED = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
}

# Groups over one process group share its link; None where its ranks cannot share memory.
_links: "weakref.WeakKeyDictionary[dist.ProcessGroup, Link | None]" = weakref.WeakKeyDictionary()


def group_over(axis: str, process_group: dist.ProcessGroup, ledger: Ledger) -> Group:
    """The Group over `process_group`: CPU tensors go through shared memory where Gloo would move them on
    one host.

    All ranks of the process group must call this, because the first call connects them.
    """
    if process_group not in _links:
        _links[process_group] = _new_link(process_group)
    link = _links[process_group]
    over_torch = TorchGroup(axis, process_group, ledger)
    return over_torch if link is None else SharedGroup(over_torch, link)


def _new_link(process_group: dist.ProcessGroup) -> Link | None:
    if process_group.size() == 1 or backends_of(process_group).get("cpu") != "gloo":
        return None
    link = open_link(process_group)
    if link is not None:
        link.finalizer = weakref.finalize(process_group, link.close)  # also at exit
    return link


@final
class SharedGroup(Group):
    """The ranks of one process group, all on this host; rare operations go through `over_torch`."""

    def __init__(self, over_torch: TorchGroup, link: Link) -> None:
        super().__init__(over_torch.axis, over_torch.rank, over_torch.size, over_torch.ledger)
        self._over_torch, self._link = over_torch, link
        self._where = f"rank {self.rank} of {self.size} along {self.axis}"

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self._over_torch.process_group

    def waits_on_host(self, device: torch.device) -> bool:
        return self._over_torch.waits_on_host(device)

    def has_queue_per_peer(self, device: torch.device) -> bool:
        return self._over_torch.has_queue_per_peer(device)

    def connect(self, device: torch.device) -> None:
        self._over_torch.connect(device)

    def _timing(self, operation: str, tensors: Sequence[Tensor]) -> Timing:
        return HOST_TIMING if _is_on_host(*tensors) else self._over_torch._timing(operation, tensors)

    def _close(self, *, failed: bool) -> None:
        _links.pop(self.process_group, None)
        self._link.close()
        del self._link  # and with it the mapped memory
        self._over_torch.close(failed=failed)

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        if not _is_reducible(tensor, op):
            return self._over_torch._all_reduce(tensor, op)
        return self._collective(operations.all_reduce(self._link, tensor, op))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:
        if not _is_reducible(tensor, op) or not _is_on_host(output):
            return self._over_torch._reduce_scatter(output, tensor, op)
        return self._collective(operations.reduce_scatter(self._link, output, tensor, op))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        if not _is_on_host(tensor, output):
            return self._over_torch._all_gather(output, tensor)
        return self._collective(operations.all_gather(self._link, output, tensor))

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        if not _is_on_host(tensor):
            return self._over_torch._broadcast(tensor, source)
        return self._collective(operations.broadcast(self._link, tensor, source))

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Work:
        return self._over_torch._all_to_all(output, tensor, output_rows, input_rows)

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Work:
        return self._over_torch._reduce(tensor, target, op)

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Work:
        return self._over_torch._scatter(output, tensor, source)

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Work:
        return self._over_torch._gather(tensor, output, target)

    # Where Gloo moves the tensors of all devices, the two ends of a message may be on different devices. So
    # all such messages go through the host.

    def _send(self, tensor: Tensor, target: int) -> Work:
        if not tensor.is_cpu and not self.has_queue_per_peer(tensor.device):
            return self._over_torch._send(tensor, target)
        steps = operations.send(self._link, _resolved(tensor), target)
        return self._begin(self._link.sends[target], steps)

    def _recv(self, tensor: Tensor, source: int) -> Work:
        queue = self._link.receives[source]
        if tensor.is_cpu:
            return self._begin(queue, operations.recv(self._link, tensor, source))
        if not self.has_queue_per_peer(tensor.device):
            return self._over_torch._recv(tensor, source)
        destination = tensor.data  # the memory that it has now
        incoming = torch.empty_like(destination, device="cpu")
        work = self._begin(queue, operations.recv(self._link, incoming, source))
        return ChainedWork(work, lambda: destination.copy_(incoming))

    def _barrier(self) -> Work:
        return self._over_torch._barrier()

    def _collective(self, steps: Steps) -> Work:
        return self._begin(self._link.collectives, steps)

    def _begin(self, queue: OperationQueue, steps: Steps) -> Work:
        return self._link.submit(queue, steps, self._where)


def _is_on_host(*tensors: Tensor) -> bool:
    return all(tensor.is_cpu for tensor in tensors)


def _resolved(tensor: Tensor) -> Tensor:
    """On the host, with the values in memory: a conjugate or negative view only marks them."""
    if tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _is_reducible(tensor: Tensor, op: Reduction) -> bool:
    has_mean = op != "mean" or tensor.dtype.is_floating_point
    return _is_on_host(tensor) and tensor.dtype in _REDUCED and has_mean
