"""The standing copy of a unit's weights, in host memory. The device has them while something uses them.

host      | weights | padding |      as the last update has left them, pinned
device    |     fetched       |      the same layout; its memory comes and goes

fetch     host → device, ahead of a use or an update
store     device → host, behind an update
drop      gives the device's memory back
"""

from typing import final

from torch import Tensor

from echelon.collectives.boundary import Copy, HostBoundary
from echelon.state.ownership import LocalParameter


@final
class HostPlace:
    """Where the weights of units stand: the first that fit into `resident_bytes` on the device, all others in
    host memory."""

    def __init__(self, boundary: HostBoundary, resident_bytes: int = 0, *, updates: bool = False) -> None:
        """`updates`: they are updated there too (offload=optimizer)."""
        self.boundary, self._left, self.updates = boundary, resident_bytes, updates

    def boundary_for(self, num_bytes: int) -> HostBoundary | None:
        """None: weights of this size stay on the device."""
        if num_bytes > self._left:
            self._left = 0
            return self.boundary
        self._left -= num_bytes
        return None


@final
class HostWeights:
    """Weights in host memory, and `tensor` on the device: all of its storage is memory while it `is_here`."""

    def __init__(self, tensor: Tensor, boundary: HostBoundary) -> None:
        """Takes the values of `tensor`, which is here."""
        self.tensor, self._boundary = tensor, boundary
        self._host = boundary.empty(tensor.numel(), tensor.dtype)
        self._host.copy_(tensor)
        self.is_here = True
        self._fetch: Copy | None = None  # that nobody has waited for
        self._last_fetch: Copy | None = None
        self._store: Copy | None = None
        self.is_storing = False  # nobody has waited for the last store

    @property
    def memory(self) -> Tensor:
        """The host's memory, whatever it holds now."""
        return self._host

    @property
    def values(self) -> Tensor:
        """The host's memory, for the host to read and, while nothing is here, to write."""
        if self._store is not None:
            self._store.join()
        return self._host

    def fetch(self) -> None:
        """Begin to bring the weights here, unless they are here or on their way."""
        if not self.is_here:
            self.tensor.untyped_storage().resize_(self.tensor.numel() * self.tensor.element_size())
            self.is_here = True
            self._fetch = self._last_fetch = self._boundary.fetch(self.tensor, self._host)

    def wait(self) -> None:
        """What the device is given from now on finds the weights here."""
        if self._fetch is not None:
            self._fetch.wait()
            self._fetch = None

    def join(self) -> None:
        """Return when no copy reads or writes the host's memory. Any thread may call this."""
        for copy in (self._last_fetch, self._store):
            if copy is not None:
                copy.join()

    def store(self) -> None:
        """Begin to bring new weights to the host."""
        self._store, self.is_storing = self._boundary.store(self._host, self.tensor), True

    def close(self) -> None:
        """Let go of the host's memory; nobody needs the weights any more. Copies hold it too, and those that
        still run are held by the boundary."""
        self._host = self._host.new_empty(0)
        self._fetch = self._last_fetch = self._store = None

    def drop(self) -> None:
        """Give the device's memory back, when no copy needs it any more."""
        if self.is_here:
            self.wait()
            if self._store is not None:
                self._store.wait()
            self.tensor.untyped_storage().resize_(0)
            self.is_here = self.is_storing = False


@final
class HostRun:
    """A local parameter in the standing copy of its unit, which the host updates."""

    def __init__(self, host: HostWeights, local: LocalParameter) -> None:
        self._host, self._shape, self._size = host, local.tensor.shape, local.tensor.numel()
        self._begin = local.tensor.storage_offset() - host.tensor.storage_offset()

    def join(self) -> None:
        """Return when no copy reads or writes it. Any thread may call this."""
        self._host.join()

    @property
    def memory(self) -> Tensor:
        return self._host.memory[self._begin : self._begin + self._size].view(self._shape)
