"""A Group whose CPU tensors go through shared memory, and the choice of it."""

import weakref
from collections.abc import Sequence
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.group import Group, Reduction
from echelon.collectives.ledger import Ledger
from echelon.collectives.shared import direct_read, staged_copy
from echelon.collectives.shared.link import Link, open_link
from echelon.collectives.shared.operation_queue import OperationQueue, Steps
from echelon.collectives.shared.slots import LANE, TensorMemory, flat_alias
from echelon.collectives.torch_group import MOVED_TYPES, ChainedWork, TorchGroup
from echelon.collectives.work import HOST_TIMING, Timing, Work
from echelon.launching.group import backends_of

# torch adds these on a CPU. Gloo does not move int16, and a boolean has no sum.
_REDUCED = MOVED_TYPES - {torch.bool} | {torch.int16}

# Groups over one process group share its link; None where its ranks cannot share memory.
_links: "weakref.WeakKeyDictionary[dist.ProcessGroup, Link | None]" = weakref.WeakKeyDictionary()


def group_over(axis: str, process_group: dist.ProcessGroup, ledger: Ledger) -> Group:
    """Return the Group over `process_group`: shared memory where Gloo would move CPU tensors on one host. All
    ranks of the process group must call this, because the first call connects them."""
    if process_group not in _links:
        _links[process_group] = _new_link(process_group)
    link = _links[process_group]
    if link is None:
        return TorchGroup(axis, process_group, ledger)
    return SharedGroup(axis, process_group, ledger, link)


def _new_link(process_group: dist.ProcessGroup) -> Link | None:
    if process_group.size() == 1 or backends_of(process_group).get("cpu") != "gloo":
        return None
    link = open_link(process_group)
    if link is not None:
        link.finalizer = weakref.finalize(process_group, link.close)  # also at exit
    return link


@final
class SharedGroup(TorchGroup):
    """The ranks of one process group, all on this host; what is not overridden here goes through torch."""

    def __init__(self, axis: str, group: dist.ProcessGroup, ledger: Ledger, link: Link) -> None:
        super().__init__(axis, group, ledger)
        self._link = link

    def _timing(self, operation: str, tensors: Sequence[Tensor]) -> Timing:
        return HOST_TIMING if _is_on_host(*tensors) else super()._timing(operation, tensors)

    def _close(self, *, failed: bool) -> None:
        _links.pop(self.process_group, None)
        self._link.close()
        del self._link  # and with it the mapped memory
        super()._close(failed=failed)

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> Work:
        if not _is_reducible(tensor, op):
            return super()._all_reduce(tensor, op)
        return self._collective(all_reduce(self._link, tensor, op))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Reduction) -> Work:
        if not _is_reducible(tensor, op) or not _is_on_host(output):
            return super()._reduce_scatter(output, tensor, op)
        return self._collective(reduce_scatter(self._link, output, tensor, op))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        if not _is_on_host(tensor, output):
            return super()._all_gather(output, tensor)
        return self._collective(all_gather(self._link, output, tensor))

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        if not _is_on_host(tensor):
            return super()._broadcast(tensor, source)
        return self._collective(broadcast(self._link, tensor, source))

    # Where Gloo moves the tensors of all devices, the two ends of a message may be on different devices. So
    # all such messages go through the host.

    def _send(self, tensor: Tensor, target: int) -> Work:
        if not tensor.is_cpu and not self.has_queue_per_peer(tensor.device):
            return super()._send(tensor, target)
        return self._submit(self._link.sends[target], send(self._link, _resolved(tensor), target))

    def _recv(self, tensor: Tensor, source: int) -> Work:
        queue = self._link.receives[source]
        if tensor.is_cpu:
            return self._submit(queue, recv(self._link, tensor, source))
        if not self.has_queue_per_peer(tensor.device):
            return super()._recv(tensor, source)
        destination = tensor.data  # the memory that it has now
        incoming = torch.empty_like(destination, device="cpu")
        work = self._submit(queue, recv(self._link, incoming, source))
        return ChainedWork(work, lambda: destination.copy_(incoming))

    def _collective(self, steps: Steps) -> Work:
        return self._submit(self._link.collectives, steps)

    def _submit(self, queue: OperationQueue, steps: Steps) -> Work:
        return self._link.submit(queue, steps, self._place)


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


# The operations as coroutines over a link: a direct read where possible and faster, else a staged copy.
#
# The size decides, and it is the same on all ranks. The call looks up the tensors' memory, on the caller's
# thread, so that later changes of the Tensor objects do not matter. Both forms reduce in rank order: the same
# bits on every rank and in every run.

_STAGED_BYTES = 1 << 17  # up to here the additional waits of a direct read cost more than the saved copy
_STAGED_SUM_OF_TWO_BYTES = 1 << 21  # an all-reduce of two ranks has one wait when staged, three when direct
_STAGED_SEND_BYTES = LANE.free_bytes  # a message that fits the lane does not wait for its target


class _Form(Protocol):
    """The operations of both forms."""

    def all_reduce(self, link: Link, flat: Tensor, op: Reduction) -> Steps: ...
    def reduce_scatter(self, link: Link, output: Tensor, whole: Tensor, op: Reduction) -> Steps: ...
    def all_gather(self, link: Link, whole: TensorMemory, own_part: TensorMemory) -> Steps: ...
    def broadcast(self, link: Link, memory: TensorMemory, source: int) -> Steps: ...
    def send(self, link: Link, memory: TensorMemory, target: int) -> Steps: ...
    def recv(self, link: Link, memory: TensorMemory, source: int) -> Steps: ...


def _choose_form(link: Link, tensor: Tensor, staged_bytes: int = _STAGED_BYTES) -> _Form:
    return direct_read if link.can_read and tensor.nbytes > staged_bytes else staged_copy


def _needs_copy(form: _Form, tensor: Tensor) -> bool:
    """Return whether peers could not read the tensor: memory pinned for a device. They can read a copy."""
    return form is direct_read and tensor.is_pinned()


def all_reduce(link: Link, tensor: Tensor, op: Reduction) -> Steps:
    staged_bytes = _STAGED_SUM_OF_TWO_BYTES if link.size == 2 else _STAGED_BYTES
    form, flat = _choose_form(link, tensor, staged_bytes), flat_alias(tensor)
    if _needs_copy(form, tensor):
        return _all_reduce_copy(form, link, flat, op)
    return form.all_reduce(link, flat, op)


async def _all_reduce_copy(form: _Form, link: Link, flat: Tensor, op: Reduction) -> None:
    copy = flat_alias(flat.clone())  # the thread that runs this may be in inference mode
    await form.all_reduce(link, copy, op)
    flat.copy_(copy)


def reduce_scatter(link: Link, output: Tensor, tensor: Tensor, op: Reduction) -> Steps:
    form, whole = _choose_form(link, tensor), flat_alias(tensor)
    readable = flat_alias(whole.clone()) if _needs_copy(form, tensor) else whole
    return form.reduce_scatter(link, flat_alias(output), readable, op)


def all_gather(link: Link, output: Tensor, tensor: Tensor) -> Steps:
    form, own_part = _choose_form(link, output), TensorMemory.of(tensor)
    return _all_gather(form, link, TensorMemory.of(output), own_part, _readable(form, tensor))


async def _all_gather(
    form: _Form, link: Link, whole: TensorMemory, own_part: TensorMemory, readable: TensorMemory
) -> None:
    destination = whole.address + link.rank * own_part.length
    if destination != own_part.address:
        own_part.copy_to(destination)
    await form.all_gather(link, whole, readable)


def broadcast(link: Link, tensor: Tensor, source: int) -> Steps:
    form = _choose_form(link, tensor)
    memory = _readable(form, tensor) if source == link.rank else TensorMemory.of(tensor)
    return form.broadcast(link, memory, source)


def send(link: Link, tensor: Tensor, target: int) -> Steps:
    form = _choose_form(link, tensor, _STAGED_SEND_BYTES)
    return form.send(link, _readable(form, tensor), target)


def recv(link: Link, tensor: Tensor, source: int) -> Steps:
    return _choose_form(link, tensor, _STAGED_SEND_BYTES).recv(link, TensorMemory.of(tensor), source)


def _readable(form: _Form, tensor: Tensor) -> TensorMemory:
    return TensorMemory.of(tensor.clone() if _needs_copy(form, tensor) else tensor)
