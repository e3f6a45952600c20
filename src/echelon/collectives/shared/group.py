"""A Group whose CPU tensors go through shared memory, and the choice of it."""

import weakref
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.group import Group, Pending, Reduction
from echelon.collectives.ledger import Ledger
from echelon.collectives.shared import steps
from echelon.collectives.shared.lines import Line, Steps
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.meeting import Meeting, agree, meet
from echelon.collectives.torch_group import Then, TorchGroup

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

# A link lives as long as its process group; None where the ranks are not all on this host.
_links: "weakref.WeakKeyDictionary[dist.ProcessGroup, Link | None]" = weakref.WeakKeyDictionary()


def group_over(axis: str, process_group: dist.ProcessGroup, ledger: Ledger) -> Group:
    """The Group over `process_group`: through shared memory where that is Gloo on one host.

    All ranks of the process group must call this, as the first time they meet here.
    """
    if process_group not in _links:
        _links[process_group] = _new_link(process_group)
    link = _links[process_group]
    over_torch = TorchGroup(axis, process_group, ledger)
    return over_torch if link is None else SharedGroup(over_torch, link)


def _new_link(process_group: dist.ProcessGroup) -> Link | None:
    if dist.get_backend(process_group) != "gloo" or process_group.size() == 1:
        return None
    with torch.device("cpu"), torch.inference_mode(False):  # whatever the default is
        meeting = meet(process_group)
        if meeting is None:
            return None
        link = _link_or_none(process_group, meeting)
        everywhere = agree(link is not None, process_group)
    if link is None or not everywhere:
        if link is not None:
            link.close()
        for met in meeting.peers:
            met.socket.close()
        return None
    weakref.finalize(process_group, link.close)  # also at exit
    return link


def _link_or_none(process_group: dist.ProcessGroup, meeting: Meeting) -> Link | None:
    """None where the system has no descriptor or no thread left."""
    backend = process_group._get_backend(torch.device("cpu"))
    try:
        return Link(process_group.rank(), meeting, backend.options._timeout.total_seconds())
    except (OSError, RuntimeError):
        return None


@final
class SharedGroup(Group):
    """The ranks of one process group, all on this host; what is rare goes through `over_torch`."""

    def __init__(self, over_torch: TorchGroup, link: Link) -> None:
        super().__init__(over_torch.axis, over_torch.rank, over_torch.size, over_torch.ledger)
        self.process_group = over_torch.process_group
        self._over_torch, self._link = over_torch, link
        self._where = f"rank {self.rank} of {self.size} along {self.axis}"

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Pending:
        if not _reducible(tensor, op):
            return self._over_torch._all_reduce(tensor, op)
        return self._collective(steps.all_reduce(self._link, tensor, op))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Pending:
        if not _reducible(tensor, op) or not _on_host(output):
            return self._over_torch._reduce_scatter(output, tensor, op)
        return self._collective(steps.reduce_scatter(self._link, output, tensor, op))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Pending:
        if not _on_host(tensor, output):
            return self._over_torch._all_gather(output, tensor)
        return self._collective(steps.all_gather(self._link, output, tensor))

    def _broadcast(self, tensor: Tensor, source: int) -> Pending:
        if not _on_host(tensor):
            return self._over_torch._broadcast(tensor, source)
        return self._collective(steps.broadcast(self._link, tensor, source))

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, output_rows: list[int], input_rows: list[int]
    ) -> Pending:
        return self._over_torch._all_to_all(output, tensor, output_rows, input_rows)

    def _reduce(self, tensor: Tensor, target: int, op: Reduction) -> Pending:
        return self._over_torch._reduce(tensor, target, op)

    def _scatter(self, output: Tensor, tensor: Tensor | None, source: int) -> Pending:
        return self._over_torch._scatter(output, tensor, source)

    def _gather(self, tensor: Tensor, output: Tensor | None, target: int) -> Pending:
        return self._over_torch._gather(tensor, output, target)

    # The two ends of a message may be on different devices: all of them go the same way, over the host.

    def _send(self, tensor: Tensor, target: int) -> Pending:
        return self._begin(self._link.sends[target], steps.send(self._link, _resolved(tensor), target))

    def _recv(self, tensor: Tensor, source: int) -> Pending:
        line = self._link.receives[source]
        if tensor.is_cpu:
            return self._begin(line, steps.recv(self._link, tensor, source))
        place = tensor.data  # its memory of now
        host = torch.empty_like(place, device="cpu")
        return Then(self._begin(line, steps.recv(self._link, host, source)), lambda: place.copy_(host))

    def _barrier(self) -> Pending:
        return self._over_torch._barrier()

    def _collective(self, operation: Steps) -> Pending:
        return self._begin(self._link.collectives, operation)

    def _begin(self, line: Line, operation: Steps) -> Pending:
        return self._link.submit(line, operation, self._where)


def _on_host(*tensors: Tensor) -> bool:
    return all(tensor.is_cpu for tensor in tensors)


def _resolved(tensor: Tensor) -> Tensor:
    """On the host, with its values in its memory: conjugates and negatives are only marked there."""
    if tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _reducible(tensor: Tensor, op: Reduction) -> bool:
    return _on_host(tensor) and tensor.dtype in _REDUCED and (op != "mean" or tensor.dtype.is_floating_point)
