"""A parcel: the memory of one storage that autograd has saved, on the device, in host memory, or on its way.

    forward     device ──store──▶ host      the device's side is let go when the copy is done
    backward    device ◀──fetch── host      new memory; the host's side stays until nobody asks any more

All of a storage travels, once, however many tensors lie in it: views come back with their strides.
"""

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives.boundary import Copy, HostBoundary
from echelon.memory.activation_offload.host_pool import HostPool
from echelon.memory.activation_offload.order import StepOrder
from echelon.nn.autograd.saved_tensors import Hooks, KeptTensor, check_unchanged

_free_reference = torch.UntypedStorage._free_weak_ref


class View(NamedTuple):
    """A tensor as elements of its storage."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def take(self, memory: Tensor) -> Tensor:
        """The same elements of another storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), self.offset, self.shape, self.strides)


@final
class Mark:
    """Whether a saved tensor was changed in place before its copy was made."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version

    def finish(self) -> None:
        """The copy is made: later changes do not matter to it."""
        if self._tensor is not None and self._tensor._version == self._version:
            self._tensor = None

    def check(self) -> None:
        """Raise, as autograd does, if it was changed."""
        if self._tensor is not None:
            check_unchanged(self._tensor, self._version)


@final
class Room:
    """Host memory of the parcels that are stored together; it goes back when all of them are gone."""

    def __init__(self, pool: HostPool, piece: Tensor) -> None:
        self.piece = piece
        self._pool, self._users = pool, 0

    def enter(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._pool.give_back(self.piece)


@final
class Parcel:
    """`group`: of the layer that was the first to save it. `marks`: of those who saved it before its copy was
    made. `observer`: counts what lies on the device."""

    def __init__(
        self, tensor: Tensor, group: int, boundary: HostBoundary, order: StepOrder, observer: Hooks | None
    ) -> None:
        storage = tensor.untyped_storage()
        self.group, self.num_bytes, self.num_users = group, storage.nbytes(), 0
        self.marks: list[Mark] = []
        self._order = order
        self._boundary, self._observer, self._device = boundary, observer, tensor.device
        self._reference: Any = storage._weak_ref()  # its address is not used again meanwhile
        self._memory: Tensor | None = None
        self._counted: KeptTensor | None = None
        self._hold(View(torch.uint8, torch.Size([self.num_bytes]), (1,), 0).take(tensor))
        self._copy: Copy | None = None
        self._host: Tensor | None = None
        self._room: Room | None = None

    @property
    def is_stored(self) -> bool:
        """Whether a copy for the host has begun."""
        return self._host is not None

    @property
    def is_here(self) -> bool:
        """Whether it takes memory of the device."""
        return self._memory is not None

    def store(self, room: Room, begin: int) -> None:
        """Begin to copy it to the host."""
        assert self._memory is not None
        self._room, self._host = room, room.piece[begin : begin + self.num_bytes]
        room.enter()
        with self._order.entered():
            self._copy = self._boundary.store(self._host, self._memory)

    def fetch(self) -> None:
        """Begin to bring it to the device, if it is not there."""
        if self._memory is None:
            assert self._host is not None
            with self._order.entered():
                memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
                self._copy = self._boundary.fetch(memory, self._host)
            self._hold(memory)

    def value(self) -> Tensor:
        """Its bytes on the device."""
        self.fetch()
        self._wait()
        assert self._memory is not None
        self._order.lend(self._memory)
        return self._memory

    def drop(self) -> None:
        """Let go of the device's side of what the host has."""
        if self.is_stored and self._memory is not None:
            self._wait()
            self._memory = self._counted = None
            for mark in self.marks:
                mark.finish()
            self.marks = []

    def forget_address(self) -> None:
        """The forward pass is over: nobody else will save this storage."""
        if self._reference is not None:
            _free_reference(self._reference)  # type: ignore[no-untyped-call]
            self._reference = None

    def end_use(self) -> None:
        """One of those who may ask for it is gone."""
        self.num_users -= 1
        if self.num_users == 0:
            self._wait()
            self._memory = self._counted = None
            self.marks = []
            if self._room is not None:
                self._room.leave()
                self._room = None

    def _hold(self, memory: Tensor) -> None:
        self._memory, self._counted = memory, KeptTensor(memory, self._observer)

    def _wait(self) -> None:
        """What the step gives to the device from now on finds the copy done."""
        copy, self._copy = self._copy, None
        if copy is not None:
            with self._order.entered():
                copy.wait()

    def __del__(self) -> None:
        self.forget_address()
