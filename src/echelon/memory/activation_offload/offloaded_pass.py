"""One forward pass through a stage: the storages that it saves, a group per layer, until its backward pass.

    forward     layer 0       layer 1       layer 2              on the device: the layer that runs, and the
                     store 0 ────── store 1 ──────               one before it, until its copy is done
    backward                  layer 2       layer 1              the layer that runs, and the one that is
                     ── fetch 1 ─── fetch 0                      fetched ahead

A group ends where a layer returns; what is saved after the last layer belongs to the loss. A storage that two
layers save is stored with the first, and fetched for the second. These stay on the device: weights and
buffers, the stage's inputs, arguments of a layer without gradients (masks, position tables: all layers share
them), and small tensors.
"""

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from echelon.memory.activation_offload.offloaded_storage import (
    OffloadedStorage,
    SavedVersion,
    StepStream,
    View,
)
from echelon.memory.storages import address_of
from echelon.nn.autograd.saved_tensors import KeptTensor, current_hooks, current_observer
from echelon.nn.tracing import untraced

if TYPE_CHECKING:
    from echelon.memory.activation_offload.offload import ActivationOffload

SMALLEST = 1024  # bytes: below, a copy costs more than the memory is worth


@final
class LayerGroup:
    def __init__(self, number: int) -> None:
        self.number = number
        self.storages: list[OffloadedStorage] = []


@final
class OffloadedPass:
    """`resident`: storages that stay on the device. `last_call`: the call of a layer, counted from 1, after
    which the backward pass follows at once; None if it comes later."""

    def __init__(
        self, offload: "ActivationOffload", resident: set[int], last_call: int | None = None
    ) -> None:
        self._offload, self._resident, self._last_call = offload, resident, last_call
        self._stream = StepStream(offload.device)
        self._num_calls = 0
        self._hooks, self._observer = current_hooks(), current_observer()
        # Saved-tensor hooks of others decide themselves what is kept, and how.
        self._keeps_all = self._hooks is not None and self._observer is None
        self._resident_of_layer: set[int] = set()
        self._known: dict[int, OffloadedStorage] = {}  # by address
        self._groups: list[LayerGroup] = []
        self._open = LayerGroup(0)
        self._position: int | None = None  # the group that the backward pass has reached

    # The forward pass.

    def enter_layer(self, resident: set[int]) -> None:
        self._resident_of_layer = resident

    def leave_layer(self) -> None:
        self._resident_of_layer = set()
        self._num_calls += 1
        self.end_group(stays=self._num_calls == self._last_call)

    def end_group(self, *, stays: bool) -> None:
        """`stays`: the backward pass follows at once, and would fetch what was just stored."""
        group = self._open
        if group.storages:
            self._groups.append(group)
            self._open = LayerGroup(len(self._groups))
            if not stays:
                self._offload.store_group(group)

    def finish_forward(self) -> None:
        for storage in self._known.values():
            storage.release_address()
        self._known, self._resident = {}, set()

    @untraced
    def pack(self, tensor: Tensor) -> "PackedTensor | KeptTensor":
        if self._keeps_all or not self._is_offloaded(tensor):
            return KeptTensor(tensor, self._hooks)
        storage, group = self._storage(tensor), self._open
        if storage not in group.storages:
            group.storages.append(storage)
        version = SavedVersion(tensor)
        if storage.is_stored:
            version.finish()
        else:
            storage.versions.append(version)
        return PackedTensor(self, group.number, storage, View.of(tensor), version)

    def _storage(self, tensor: Tensor) -> OffloadedStorage:
        address = address_of(tensor)
        known = self._known.get(address)
        # A copy that has begun lacks later changes, and other tensors may have changed the storage since.
        if known is not None and known.num_users and (not known.is_stored or tensor._version == 0):
            return known
        storage = OffloadedStorage(
            tensor, self._open.number, self._offload.boundary, self._stream, self._observer
        )
        if known is not None:
            known.release_address()
        self._known[address] = storage
        return storage

    def _is_offloaded(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.device != self._offload.device:
            return False
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return False
        if type(tensor) is not Tensor or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return False
        address = address_of(tensor)
        is_small = tensor.untyped_storage().nbytes() < SMALLEST
        return not is_small and address not in self._resident and address not in self._resident_of_layer

    # The backward pass.

    def begin_backward(self) -> None:
        if self._groups:
            self._advance_to(len(self._groups) - 1)

    def pause_backward(self) -> None:
        """The rest of the backward pass comes later: release the memory of which the host has a copy."""
        self._position = None
        for group in self._groups:
            for storage in group.storages:
                storage.drop()

    def value_of(self, storage: OffloadedStorage, number: int) -> Tensor:
        """Return the bytes of a storage for the backward pass of layer `number`, and fetch ahead."""
        # Autograd runs some nodes of a layer after the first of the next one: these do not move the position
        # back.
        is_straggler = self._position is not None and number == self._position + 1
        if number != self._position and not is_straggler and number < len(self._groups):
            self._advance_to(number)
        return storage.value()

    def _advance_to(self, number: int) -> None:
        """The backward pass has reached this layer: release those behind it, and fetch the next one."""
        self._offload.release_stored()
        self._position = number
        for group in self._groups[number + 1 :]:
            for storage in group.storages:
                if storage.group > number:  # else an earlier layer needs it too
                    storage.drop()
        for group in reversed(self._groups[max(0, number - 1) : number + 1]):
            self._offload.fetch_group(group)


class PackedTensor:
    """Held by autograd in place of a tensor."""

    __slots__ = ("_group", "_pass", "_storage", "_version", "_view")

    def __init__(
        self, of_pass: OffloadedPass, group: int, storage: OffloadedStorage, view: View, version: SavedVersion
    ) -> None:
        self._pass, self._group, self._storage = of_pass, group, storage
        self._view, self._version = view, version
        storage.num_users += 1

    def take(self) -> Tensor:
        self._version.check()
        return self._view.take(self._pass.value_of(self._storage, self._group))

    @untraced
    def __del__(self) -> None:
        self._storage.end_use()


@untraced
def take(saved: Any) -> Tensor:
    tensor: Tensor = saved.take()
    return tensor
