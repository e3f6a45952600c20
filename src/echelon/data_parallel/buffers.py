"""Buffers of a model (running statistics and such) among replicas: replica 0's are everyone's."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from echelon.collectives import Group


class Buffers:
    """Keeps the buffers of replicas equal. Only those that a step may have changed are sent."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._module, self._group = module, group
        # Their kernels change these without leaving a mark on the tensor's version.
        norms = [its for its in module.modules() if isinstance(its, _NormBase) and its.track_running_stats]
        self._statistics = {buffer for norm in norms for buffer in norm.buffers()}
        self._send(list(module.buffers()))
        self._seen = self._look()

    def share(self) -> None:
        """Send replica 0's buffers to all, where any replica may have changed them."""
        buffers = list(self._module.buffers())  # anew: a model may assign a buffer instead of changing it
        if not buffers:
            return
        moved = [
            buffer in self._statistics or mark != seen
            for buffer, mark, seen in zip(buffers, self._look(), self._seen, strict=True)
        ]
        flags = torch.tensor(moved, dtype=torch.uint8).to(buffers[0].device)
        with self._group.ledger.about("buffers"):
            self._group.all_reduce(flags, "max")
        self._send([buffer for buffer, flag in zip(buffers, flags.tolist(), strict=True) if flag])
        self._seen = self._look()

    def _look(self) -> list[tuple[int, int]]:
        """What changes when a buffer does: which tensor it is, and its version."""
        return [(id(buffer), buffer._version) for buffer in self._module.buffers()]

    def _send(self, buffers: list[Tensor]) -> None:
        with self._group.ledger.about("buffers"):
            for buffer in buffers:
                broadcast(buffer, self._group)


def broadcast(tensor: Tensor, group: Group) -> None:
    """Replica 0's values into everyone's `tensor`, however it lies in memory."""
    packed = tensor.detach().contiguous()
    group.broadcast(packed, source=0)
    if packed.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(packed)
