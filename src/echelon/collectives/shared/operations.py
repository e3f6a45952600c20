"""The operations as coroutines over a Link: a direct read where possible and faster, else a staged copy.

The size decides, and it is the same on all ranks. The call looks up the tensors' memory, on the caller's
thread, so that later changes of the Tensor objects do not matter. Both forms reduce in rank order: the same
bits on every rank and in every run.
"""

from typing import Protocol

from torch import Tensor

from echelon.collectives.group import Reduction
from echelon.collectives.shared import direct_read, staged_copy
from echelon.collectives.shared.link import Link
from echelon.collectives.shared.operation_queue import Steps
from echelon.collectives.shared.slots import LANE
from echelon.collectives.shared.tensor_memory import TensorMemory, flat_alias

_STAGED_BYTES = 1 << 17  # up to here the additional waits of a direct read cost more than the saved copy
_STAGED_SUM_OF_TWO_BYTES = 1 << 21  # an all-reduce of two ranks has one wait when staged, three when direct
_STAGED_SEND_BYTES = LANE.free_bytes  # a message that fits the lane does not wait for its target


class _Form(Protocol):
    """What both forms can do."""

    def all_reduce(self, link: Link, flat: Tensor, op: Reduction) -> Steps: ...
    def reduce_scatter(self, link: Link, output: Tensor, whole: Tensor, op: Reduction) -> Steps: ...
    def all_gather(self, link: Link, whole: TensorMemory, own_part: TensorMemory) -> Steps: ...
    def broadcast(self, link: Link, memory: TensorMemory, source: int) -> Steps: ...
    def send(self, link: Link, memory: TensorMemory, target: int) -> Steps: ...
    def recv(self, link: Link, memory: TensorMemory, source: int) -> Steps: ...


def _choose_form(link: Link, tensor: Tensor, staged_bytes: int = _STAGED_BYTES) -> _Form:
    return direct_read if link.can_read and tensor.nbytes > staged_bytes else staged_copy


def _needs_copy(form: _Form, tensor: Tensor) -> bool:
    """Whether peers could not read the tensor: memory pinned for a device. They can read a copy."""
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
