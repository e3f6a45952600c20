"""Units whose weights lie in host memory (offload=parameters). The device has them while something uses them.

host      | weights | padding |      as the last update has left them, pinned
device    |     fetched       |      the same layout; its memory is allocated for each use

fetch     host → device, ahead of a use or an update
store     device → host, behind an update
drop      gives the device's memory back
"""

from collections.abc import Callable, Set
from functools import partial
from typing import Any, final

from torch import Tensor, nn

from echelon.collectives import Group
from echelon.collectives.boundary import Copy, HostBoundary
from echelon.parallel.data.parameter_set import Unit
from echelon.parallel.data.zero.flat import FlatUnit, UnitOwner
from echelon.state.ownership import LocalParameter


@final
class HostPlace:
    """The place of units: the first that fit into `resident_bytes` on the device, others on the host."""

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
        self.memory = boundary.empty(tensor.numel(), tensor.dtype)  # the host's, whatever it holds now
        self.memory.copy_(tensor)
        self.is_here = True
        self._fetch: Copy | None = None  # that no stream has waited for
        self._last_fetch: Copy | None = None
        self._store: Copy | None = None
        self.is_storing = False  # no stream has waited for the last store

    @property
    def values(self) -> Tensor:
        """The host's memory, for the host to read and, while nothing is here, to write. Waits for the last
        store: a copy from the device runs behind the host's back."""
        if self._store is not None:
            self._store.join()
        return self.memory

    def fetch(self) -> None:
        """Begin to bring the weights here, unless they are here or on their way."""
        if not self.is_here:
            self.tensor.untyped_storage().resize_(self.tensor.numel() * self.tensor.element_size())
            self.is_here = True
            self._fetch = self._last_fetch = self._boundary.fetch(self.tensor, self.memory)

    def wait(self) -> None:
        """Let what is launched from now on wait for the weights, on the device; the host goes on."""
        if self._fetch is not None:
            self._fetch.wait()
            self._fetch = None

    def join(self) -> None:
        """Return when no copy reads or writes the host's memory. Any thread may call this."""
        for copy in (self._last_fetch, self._store):
            if copy is not None:
                copy.join()

    def store(self) -> None:
        self._store, self.is_storing = self._boundary.store(self.memory, self.tensor), True

    def close(self) -> None:
        """Let go of the host's memory: the engine is closed. The boundary holds copies that still run."""
        self.memory = self.memory.new_empty(0)
        self._fetch = self._last_fetch = self._store = None

    def drop(self) -> None:
        """Give the device's memory back, when no copy needs it any more."""
        if self.is_here:
            # The caching allocator gives this memory to the next allocation of the computing stream at once:
            # that stream must be behind the copies, which run on streams of their own.
            self.wait()
            if self._store is not None:
                self._store.wait()
            self.tensor.untyped_storage().resize_(0)
            self.is_here = self.is_storing = False


@final
class HostRun:
    """A local parameter in the host memory of its unit, which the host updates."""

    def __init__(self, host: HostWeights, local: LocalParameter) -> None:
        self._host, self._shape, self._size = host, local.tensor.shape, local.tensor.numel()
        self._begin = local.tensor.storage_offset() - host.tensor.storage_offset()

    def join(self) -> None:
        """Return when no copy reads or writes it. Any thread may call this."""
        self._host.join()

    @property
    def memory(self) -> Tensor:
        return self._host.memory[self._begin : self._begin + self._size].view(self._shape)


@final
class HostUnit(FlatUnit):
    """A unit that lies in host memory between uses: this rank's shard, or the whole weights with it."""

    offloaded = True

    def __init__(self, *arguments: Any, boundary: HostBoundary, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.host = HostWeights(self.shard if self.sharded else self.flat, boundary)
        self._is_fetching = False  # for a gather

    def gather(self) -> None:
        """Begin to make the weights whole. A shard is fetched by the first call, and gathered by the next
        one, or by `synchronize`: so that its copy is done, or nearly, when a message waits for it."""
        if not self.is_gathered:
            self.is_gathered = True
            self._fetch()
            self._is_fetching = True
        elif self._is_fetching and self.sharded:
            self._finish_fetch()

    def _fetch(self) -> None:
        if not self.host.is_here:
            # An update on the host (offload=optimizer) may still write the values that are fetched.
            self._owner.wait_for_weights(self._local)
        self.host.fetch()

    def _finish_fetch(self) -> None:
        self.host.wait()
        self._is_fetching = False
        if self.sharded:
            self._gather_shards()

    def synchronize(self) -> None:
        was_fetching = self._is_fetching
        if was_fetching:
            self._finish_fetch()
        if self._gathering is not None:
            super().synchronize()
            if self.sharded:
                self.host.drop()  # the whole weights are here
        elif was_fetching:
            self._show()

    def free(self) -> None:
        """Give the device's memory back; the weights stay in host memory."""
        if not self.is_gathered:
            return
        if self._is_fetching and self.sharded:  # its messages have not begun
            self._is_fetching = False
        else:
            self.synchronize()
            self._hide()
            if self.sharded:
                self.flat.untyped_storage().resize_(0)
        self.is_gathered = False
        self._let_go()

    def fetch(self) -> None:
        if not (self.sharded and self.is_gathered):
            self._fetch()

    def bring(self) -> None:
        if self.is_gathered:
            self.synchronize()
        self._fetch()
        self.host.wait()

    def put_back(self) -> None:
        # This rank has updated its part of weights that are whole on each host: get the others' first.
        if not self.sharded and self.group.size > 1:
            self.group.all_gather(self.flat, self.shard)
        self.host.store()
        if self.sharded or not self.is_gathered:
            self._let_go()

    def _let_go(self) -> None:
        """Drop what is needed no more on the device: now, or when its store is done."""
        if self.host.is_storing:
            self._owner.store_unit(self)
        else:
            self.host.drop()

    def drop(self) -> None:
        in_use = self._is_fetching if self.sharded else self.is_gathered
        if not in_use:
            self.host.drop()

    def stored_values(self, local: LocalParameter) -> Tensor:
        begin = local.tensor.storage_offset() - self.host.tensor.storage_offset()
        return self.host.values[begin : begin + local.tensor.numel()].view(local.tensor.shape)

    def host_run(self, local: LocalParameter) -> HostRun:
        return HostRun(self.host, local)

    def close(self) -> None:
        super().close()
        self.host.close()


def flatten(
    unit: Unit,
    group: Group,
    separate: Set[nn.Parameter],
    sharded: bool,
    host: HostPlace | None,
    owner: UnitOwner,
) -> list[FlatUnit]:
    """The memory of one unit, by kind and type: its trained parameters and, where weights leave the device,
    its frozen ones; a parameter of `separate` by itself. `sharded`: each rank keeps a part of the weights."""
    kinds: dict[tuple[object, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in unit.parameters:
        if parameter.requires_grad or sharded or host is not None:
            own = name if parameter in separate else ""
            kind = (parameter.requires_grad, parameter.dtype, parameter.device, own)
            kinds.setdefault(kind, []).append((name, parameter))
    flats = []
    for parameters in kinds.values():
        size = sum(p.numel() * p.element_size() for _, p in parameters)
        boundary = None if host is None else host.boundary_for(size // group.size if sharded else size)
        make: Callable[..., FlatUnit] = FlatUnit if boundary is None else partial(HostUnit, boundary=boundary)
        flat = make(unit.name, parameters, group, sharded=sharded, owner=owner)
        flat.free()  # before the next unit takes memory
        flats.append(flat)
    return flats
