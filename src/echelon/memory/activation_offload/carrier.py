"""The carrier of one rank: copies between its device and the host, and the trips of its microbatches."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from echelon.collectives import Ledger
from echelon.collectives.boundary import HostBoundary
from echelon.memory.activation_offload.host_pool import HostPool
from echelon.memory.activation_offload.parcel import Parcel, Room
from echelon.memory.activation_offload.trip import Group, Trip, take
from echelon.nn.autograd.saved_tensors import current_observer, replace

Slot = tuple[int, int]  # stage, microbatch

_ALIGNMENT = 256  # bytes, of parcels in host memory
_SUBJECT = "activations"


@final
class Carrier:
    """Stores groups behind the forward pass, one at a time, and fetches them ahead of the backward pass.

    `going_back`: the stages of which the backward pass follows at once, so that what the last layer and the
    loss save stays; and how many layers each of them calls.
    """

    def __init__(
        self,
        boundary: HostBoundary,
        ledger: Ledger,
        device: torch.device,
        pool: HostPool,
        going_back: Mapping[int, int] | None = None,
    ) -> None:
        self.boundary, self.device, self.pool = boundary, device, pool
        self._ledger, self._going_back = ledger, going_back or {}
        self.trip: Trip | None = None  # of the forward pass that runs
        self._trips: WeakValueDictionary[Slot, Trip] = WeakValueDictionary()  # while autograd has any of it
        self._leaving: deque[list[Parcel]] = deque()  # of groups whose copies to the host have begun
        boundary.account(_SUBJECT, lambda: self.pool.pieces)

    @contextmanager
    def passing(self, slot: Slot, standing: Iterable[Tensor]) -> Iterator[None]:
        """Around a forward pass and its loss. `standing`: tensors that are there anyway."""
        if not torch.is_grad_enabled():
            yield
            return
        storages = {t.untyped_storage()._cdata for t in standing if t.layout is torch.strided}
        trip = self.trip = Trip(self, storages, self._going_back.get(slot[0]))
        pack = trip.pack  # one object, which hooks are known by
        try:
            with replace(pack, take, current_observer()):
                yield
        finally:
            self.trip = None
            trip.finish_forward()
        self._trips[slot] = trip

    def store(self, slot: Slot) -> None:
        """The forward pass is over: what it has saved since the last layer goes too."""
        trip = self._trips.get(slot)
        if trip is not None:
            trip.end_group(stays=slot[0] in self._going_back)

    def fetch(self, slot: Slot) -> None:
        """The backward pass, or a part of it, comes next: begin to bring what it needs first."""
        trip = self._trips.get(slot)
        if trip is not None:
            trip.begin_backward()

    def set_aside(self, slot: Slot) -> None:
        """The first part of the backward pass is over, and the second comes later."""
        trip = self._trips.get(slot)
        if trip is not None:
            trip.set_aside()

    def forget(self) -> None:
        """No backward pass comes for what is under way."""
        self._trips.clear()
        self.settle()

    def send(self, group: Group) -> None:
        """Begin to store what a layer has saved; what the one before it has saved is let go."""
        leaving = [parcel for parcel in group.parcels if parcel.num_users and not parcel.is_stored]
        begins = _begins([parcel.num_bytes for parcel in leaving])
        piece = self.pool.take(begins[-1]) if leaving else None
        if piece is None:  # nothing is to be stored, or there is no memory for it
            return
        room = Room(self.pool, piece)
        with self._ledger.about(_SUBJECT):
            for parcel, begin in zip(leaving, begins, strict=False):
                parcel.store(room, begin)
        self._leaving.append(leaving)
        self.settle(but=1)

    def bring(self, group: Group) -> None:
        """Begin to fetch what is not on the device."""
        with self._ledger.about(_SUBJECT):
            for parcel in group.parcels:
                if parcel.num_users:
                    parcel.fetch()

    def settle(self, *, but: int = 0) -> None:
        """Let go of what the host has, but for the last groups."""
        while len(self._leaving) > but:
            for parcel in self._leaving.popleft():
                parcel.drop()


def _begins(sizes: list[int]) -> list[int]:
    """Where each lies in one piece, and where the last ends."""
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return begins
