"""The weights that a late update replaces while somebody reads the newest: they go back before the next step.

With delay=1 the device has W(t − 1) between two steps, and the host has W(t). An evaluation is of W(t), and
the next step computes with W(t − 1) again: to look changes no training.
"""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from echelon.collectives import HostBoundary
from echelon.update.offload.host_twins import HostTwins, Twin, views_like
from echelon.update.offload.weight_return import Returning


@final
class KeptWeights:
    """Has memory from the first time on that somebody reads."""

    def __init__(self, twins: HostTwins, boundary: HostBoundary) -> None:
        self._twins, self._boundary = twins, boundary
        self._memory: list[Tensor] = []
        self._views: dict[Tensor, Tensor] = {}  # by local parameter
        self._replaced: Sequence[Returning] = ()
        boundary.account("parameters", lambda: self._memory)

    def keep(self, replaced: Sequence[Returning]) -> None:
        """The weights of these updates are about to come up."""
        if not self._memory:
            self._allocate()
        self._replaced = replaced
        stores = [
            self._boundary.store(self._views[twin.local.tensor], twin.local.tensor.detach())
            for twin in self._kept()
            if twin.host_run is None
        ]
        for twin in self._kept():
            if twin.host_run is not None:
                twin.host_run.join()
                self._views[twin.local.tensor].copy_(twin.host_run.memory)
        for copy in stores:
            copy.wait()

    def forget(self) -> None:
        """The newest weights stay."""
        self._replaced = ()

    def put_back(self) -> Sequence[Returning]:
        """Bring back what was kept. Returns the updates that are late again."""
        fetches = [
            self._boundary.fetch(twin.local.tensor.detach(), self._views[twin.local.tensor])
            for twin in self._kept()
            if twin.host_run is None
        ]
        for twin in self._kept():
            if twin.host_run is not None:
                twin.host_run.join()
                twin.host_run.memory.copy_(self._views[twin.local.tensor])
        for copy in fetches:
            copy.wait()
        replaced, self._replaced = self._replaced, ()
        return replaced

    def is_changed(self) -> bool:
        """Whether the user has changed a weight since the newest came up."""
        return any(twin.is_changed for twin in self._kept())

    def num_bytes(self) -> int:
        """What it may take."""
        return sum(twin.local.tensor.nbytes for twin in self._twins.all)

    def _kept(self) -> list[Twin]:
        return [twin for each in self._replaced for twin in each.twins]

    def _allocate(self) -> None:
        for dtype in dict.fromkeys(twin.local.tensor.dtype for twin in self._twins.all):
            twins = [twin for twin in self._twins.all if twin.local.tensor.dtype == dtype]
            memory, views = views_like(twins, dtype, self._boundary.empty)
            self._memory.append(memory)
            self._views |= {twin.local.tensor: view for twin, view in zip(twins, views, strict=True)}
