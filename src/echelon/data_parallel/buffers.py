"""Buffers of a model (running statistics and such) among replicas: replica 0's are everyone's."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from echelon.collectives import Group


class Buffers:
    """Keeps the buffers of replicas equal. Only those that a step may have changed are sent."""

    def __init__(self, module: nn.Module, group: Group) -> None:
        self._buffers = list(module.buffers())
        self._group = group
        # Their kernels change these without leaving a mark on the tensor's version.
        norms = [its for its in module.modules() if isinstance(its, _NormBase) and its.track_running_stats]
        self._statistics = {buffer for norm in norms for buffer in norm.buffers()}
        self._send(self._buffers)
        self._versions = [buffer._version for buffer in self._buffers]

    def share(self) -> None:
        """Send replica 0's buffers to all, where any replica may have changed them."""
        if not self._buffers:
            return
        moved = [
            buffer in self._statistics or buffer._version != version
            for buffer, version in zip(self._buffers, self._versions, strict=True)
        ]
        flags = torch.tensor(moved, dtype=torch.uint8).to(self._buffers[0].device)
        with self._group.ledger.about("buffers"):
            self._group.all_reduce(flags, "max")
        self._send([b for b, flag in zip(self._buffers, flags.tolist(), strict=True) if flag])
        self._versions = [buffer._version for buffer in self._buffers]

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
