"""Buffers of a model (running statistics and such) among replicas: those of replica 0 are everyone's."""

from collections.abc import Sequence
from itertools import compress

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from echelon.collectives import Group
from echelon.data_parallel.flags import set_anywhere
from echelon.data_parallel.packed_broadcast import broadcast_packed

SMALL = 2**20  # bytes of all buffers that are sent in every step, where asking would wait for the device


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
        buffers = list(self._module.buffers())  # a model may assign a buffer instead of changing it
        if not buffers:
            return
        with self._group.ledger.about("buffers"):
            broadcast_packed(list(compress(buffers, self._changed_anywhere(buffers))), self._group)
        self._marks = self._current_marks()

    def _changed_anywhere(self, buffers: Sequence[Tensor]) -> Sequence[bool]:
        """Which buffers some replica may have changed."""
        asks = buffers[0].is_cpu if self._asks is None else self._asks
        if not asks and sum(buffer.nbytes for buffer in buffers) <= SMALL:
            return [True] * len(buffers)
        changed = [
            buffer in self._statistics or mark != earlier
            for buffer, mark, earlier in zip(buffers, self._current_marks(), self._marks, strict=True)
        ]
        return set_anywhere(changed, self._group, buffers[0].device)

    def _current_marks(self) -> list[tuple[int, int]]:
        """What changes when a buffer does: which tensor it is, and its version."""
        return [(id(buffer), buffer._version) for buffer in self._module.buffers()]
