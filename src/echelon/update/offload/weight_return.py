"""New weights on their way from the host: sent when an update has made them, waited for when first used.

With delay=1 the device has W(t − 1) between two steps, and the host has W(t). An evaluation is of W(t), and
the next step computes with W(t − 1) again: `KeptWeights` has these meanwhile, so that reading changes
nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import final

from torch import Tensor

from echelon.collectives import Copy, HostBoundary, LateFetch
from echelon.state.ownership import LocalParameter
from echelon.update.offload.host_twins import HostTwins, Twin
from echelon.update.offload.host_worker import Ticket
from echelon.update.precision.flat_memory import views_like


@final
class Returning:
    """The weights of one job. `earlier`: copies out of the same host memory that may still run."""

    def __init__(self, twins: Sequence[Twin], fetches: Sequence[LateFetch], earlier: Sequence[Copy]) -> None:
        self.twins, self._fetches, self.earlier = twins, fetches, earlier
        self.ticket: Ticket | None = None
        self.copies: list[Copy] = []

    def send(self) -> None:
        """The weights are there: begin to bring them up. Any thread may call this."""
        self.copies = [fetch.start() for fetch in self._fetches]


@final
class WeightReturn:
    def __init__(self, boundary: HostBoundary) -> None:
        self._boundary = boundary
        self._on_the_way: dict[Tensor, Returning] = {}  # by local parameter
        self.delayed: list[Returning] = []  # made, or being made, and kept on the host
        self._last: dict[Tensor, Copy] = {}  # out of the memory of each twin
        # Told in the thread of the step: these weights must not be read until they have arrived.
        self.on_expect: Callable[[Sequence[LocalParameter]], None] = lambda _: None
        self.on_arrive: Callable[[Sequence[LocalParameter]], None] = lambda _: None

    def expect(self, twins: Sequence[Twin], *, announce: bool) -> Returning:
        """An update will make new weights; without `announce` they stay on the host for a step."""
        if not announce:
            kept = Returning(twins, [], self._earlier(twins))
            self.record_versions(twin for twin in twins if twin.local.tensor not in self._on_the_way)
            self.delayed.append(kept)
            return kept
        self.wait([twin.local.tensor for twin in twins])
        fetches = [
            self._boundary.announce_fetch(each.local.tensor.detach(), each.weights) for each in _coming(twins)
        ]
        returning = Returning(twins, fetches, self._earlier(twins))
        self.record_versions(twins)
        self._mark(returning)
        return returning

    def _earlier(self, twins: Sequence[Twin]) -> list[Copy]:
        return [self._last[each.local.tensor] for each in twins if each.local.tensor in self._last]

    def delay_again(self, updates: Sequence[Returning]) -> None:
        """The device has the weights of before these updates again."""
        self.delayed = list(updates)
        self.record_versions(twin for each in updates for twin in each.twins)

    def send_delayed(self) -> None:
        """All updates that were kept back are made: send their weights."""
        for kept in self.delayed:
            kept.copies = [
                self._boundary.fetch(twin.local.tensor.detach(), twin.weights) for twin in _coming(kept.twins)
            ]
            for twin in kept.twins:
                if twin.host_run is not None:
                    twin.host_run.join()
                    twin.host_run.memory.copy_(twin.weights)
            self._remember(kept)
            self._mark(kept)
        self.delayed = []

    def changed_twins(self) -> list[Twin]:
        """Return twins kept back whose weights the user has changed meanwhile."""
        return [twin for kept in self.delayed for twin in kept.twins if self.is_changed(twin)]

    def is_changed(self, twin: Twin) -> bool:
        """Return whether the user has changed a weight since it came up, and the twin has other values."""
        return twin.local.tensor not in self._on_the_way and twin.is_changed

    def _mark(self, returning: Returning) -> None:
        self._on_the_way |= dict.fromkeys((twin.local.tensor for twin in returning.twins), returning)
        self.on_expect([twin.local for twin in returning.twins])

    def wait(self, tensors: Sequence[Tensor]) -> None:
        """Return when what the device is given from now on finds the new weights of these."""
        for tensor in tensors:
            if tensor in self._on_the_way:
                self._finish(self._on_the_way[tensor])

    def wait_all(self) -> None:
        self.wait(list(self._on_the_way))

    def receive_all(self) -> None:
        """All updates are made, and no thread makes more: let the device wait for what was sent."""
        for returning in dict.fromkeys(self._on_the_way.values()):
            self._receive(returning)

    def _finish(self, returning: Returning) -> None:
        assert returning.ticket is not None
        returning.ticket.wait()
        self._receive(returning)

    def _receive(self, returning: Returning) -> None:
        for copy in returning.copies:
            copy.wait()
        for twin in returning.twins:
            self._on_the_way.pop(twin.local.tensor, None)
        self._remember(returning)
        self.on_arrive([twin.local for twin in returning.twins])
        self.record_versions(returning.twins)

    def _remember(self, returning: Returning) -> None:
        for twin, copy in zip(_coming(returning.twins), returning.copies, strict=True):
            self._last[twin.local.tensor] = copy

    def record_versions(self, twins: Iterable[Twin]) -> None:
        for twin in twins:
            twin.version = twin.current_version()


def _coming(twins: Sequence[Twin]) -> list[Twin]:
    """Return twins whose weights go to the device when they are made; others are fetched for each use."""
    return [twin for twin in twins if twin.host_run is None]


@final
class KeptWeights:
    """Takes memory when the newest weights are first read."""

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
        self._copy(back=False)

    def _copy(self, *, back: bool) -> None:
        """Copy weights to where they are kept, or back."""
        copies = []
        for twin in self._kept():  # all copies of a device begin before the host's threads are waited for
            kept, weights = self._views[twin.local.tensor], twin.local.tensor.detach()
            if twin.host_run is None:
                begun = self._boundary.fetch(weights, kept) if back else self._boundary.store(kept, weights)
                copies.append(begun)
        for twin in self._kept():
            kept, run = self._views[twin.local.tensor], twin.host_run
            if run is not None:
                run.join()
                target, source = (run.memory, kept) if back else (kept, run.memory)
                target.copy_(source)
        for copy in copies:
            copy.wait()

    def forget(self) -> None:
        self._replaced = ()

    def put_back(self) -> Sequence[Returning]:
        """Bring back what was kept. Returns the updates that are late again."""
        self._copy(back=True)
        replaced, self._replaced = self._replaced, ()
        return replaced

    def is_changed(self) -> bool:
        """Return whether the user has changed a weight since the newest came up."""
        return any(twin.is_changed for twin in self._kept())

    def num_bytes(self) -> int:
        return sum(twin.local.tensor.nbytes for twin in self._twins.all)

    def _kept(self) -> list[Twin]:
        return [twin for each in self._replaced for twin in each.twins]

    def _allocate(self) -> None:
        for dtype in dict.fromkeys(twin.local.tensor.dtype for twin in self._twins.all):
            twins = [twin for twin in self._twins.all if twin.local.tensor.dtype == dtype]
            memory, views = views_like([twin.local.tensor for twin in twins], dtype, self._boundary.empty)
            self._memory.append(memory)
            self._views |= {twin.local.tensor: view for twin, view in zip(twins, views, strict=True)}
