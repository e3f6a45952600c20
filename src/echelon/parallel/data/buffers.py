"""Buffers of a model (running statistics and such) among replicas: all take those of replica 0."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.batchnorm import _NormBase

from echelon.collectives import Group
from echelon.collectives.agreement import device_fingerprint, gather_rows, set_anywhere
from echelon.collectives.buffer_layout import portions

SMALL = 2**20  # bytes of all buffers that are sent in every step, where asking would wait for the device


class _Mark(NamedTuple):
    """The identity and the version of a buffer: one of them changes when it does."""

    tensor: "weakref.ref[Tensor]"
    version: int

    def is_on(self, buffer: Tensor) -> bool:
        return self.tensor() is buffer and self.version == buffer._version


class Buffers:
    """Keeps the buffers of replicas equal. Only those that a step may have changed are sent."""

    def __init__(self, module: nn.Module, group: Group, *, asks: bool | None = None) -> None:
        """The buffers are equal already: all ranks start from one model.

        `asks`: replicas ask each other which buffers any of them has changed, however small they are. To read
        the answer is to wait for the device, so by default they ask on the CPU.
        """
        self._module, self._group, self._asks = module, group, asks
        # The kernels of these change their statistics without leaving a mark on the tensor's version.
        norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        self._statistics = {buffer for norm in norms for buffer in norm.buffers()}
        self._marks = self._current_marks()

    def share(self) -> None:
        """Send replica 0's buffers to all, where any replica may have changed them."""
        if self._group.size == 1:
            return
        # Named again each time: a model may assign another tensor instead of changing the buffer in place.
        buffers = dict(self._module.named_buffers())
        if not buffers:
            return
        with self._group.ledger.about("buffers"):
            changed = self._changed_anywhere(buffers)
            broadcast_packed(list(compress(buffers.values(), changed)), self._group)
        self._marks = self._current_marks()

    def differing(self, *, has_run: bool) -> list[str]:
        """Names of buffers whose values differ among the replicas that have run. Reads the device."""
        buffers = dict(self._module.named_buffers())
        if self._group.size == 1 or not buffers:
            return []
        device = next(iter(buffers.values())).device
        local = torch.zeros(len(buffers) + 1, 2, dtype=torch.int64, device=device)
        local[-1] = int(has_run)
        for row, (name, buffer) in zip(local, buffers.items(), strict=False):
            if buffer.nbytes <= SMALL or self._may_have_changed(name, buffer):
                row.copy_(device_fingerprint(buffer))
        rows = [row for row in gather_rows(local, self._group, "checks").tolist() if row[-1][0]]
        return [name for i, name in enumerate(buffers) if any(row[i] != rows[0][i] for row in rows)]

    def _changed_anywhere(self, buffers: Mapping[str, Tensor]) -> Sequence[bool]:
        first = next(iter(buffers.values()))
        asks = first.is_cpu if self._asks is None else self._asks
        if not asks and sum(buffer.nbytes for buffer in buffers.values()) <= SMALL:
            return [True] * len(buffers)
        changed = [self._may_have_changed(name, buffer) for name, buffer in buffers.items()]
        return set_anywhere(changed, self._group, first.device)

    def _may_have_changed(self, name: str, buffer: Tensor) -> bool:
        return buffer in self._statistics or name not in self._marks or not self._marks[name].is_on(buffer)

    def _current_marks(self) -> dict[str, _Mark]:
        named = self._module.named_buffers()
        return {name: _Mark(weakref.ref(buffer), buffer._version) for name, buffer in named}


# Broadcast many tensors in few messages, through a buffer whose size does not depend on the model.


BYTES_AT_ONCE = 32 * 2**20


@torch.no_grad()
def broadcast_packed(tensors: Sequence[Tensor], group: Group) -> None:
    """Rank 0's values into everyone's tensors, however they lie in memory."""
    for portion in _portions(tensors):
        _broadcast(portion, group)


def _broadcast(portion: list[Tensor], group: Group) -> None:
    """Through a buffer that is gone when this returns; a single contiguous tensor is its own buffer."""
    flat = _flatten_dense_tensors([tensor.contiguous() for tensor in portion])
    group.broadcast(flat, source=0)
    torch._foreach_copy_(portion, list(_unflatten_dense_tensors(flat, portion)))


def _portions(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and device, in portions of at most `BYTES_AT_ONCE`, or one element."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).extend(_pieces(tensor.detach()))
    for alike in kinds.values():
        yield from portions(alike, lambda tensor: tensor.nbytes, BYTES_AT_ONCE)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Views of a tensor, none larger than `BYTES_AT_ONCE`; none of a tensor without elements."""
    if tensor.nbytes <= BYTES_AT_ONCE or tensor.numel() == 1:
        yield from [tensor] if tensor.numel() else []
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    for rows in tensor.split(max(1, BYTES_AT_ONCE // row_bytes)):
        yield from _pieces(rows[0] if len(rows) == 1 else rows)
