"""offload=activations: tensors that layers save go to host memory, and come back for the backward pass.

    forward     layer 0       layer 1       layer 2              on the device: the layer that runs, and the
                     store 0 ────── store 1 ──────               one before it, until its copy is done
    backward                  layer 2       layer 1              the layer that runs, and the one that is
                     ── fetch 1 ─── fetch 0                      fetched ahead

A group ends where a layer returns; what is saved after the last layer belongs to the loss. A storage that two
layers save is stored with the first, and fetched for the second. These stay on the device: weights and
buffers, the stage's inputs, arguments of a layer without gradients (masks, position tables: all layers share
them), and small tensors.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.collectives.boundary import HostBoundary
from echelon.collectives.buffer_layout import ALIGNMENT, round_up
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.hardware import total_memory
from echelon.memory.activation_offload.offloaded_storage import (
    HostPool,
    OffloadedStorage,
    SavedVersion,
    SharedPiece,
    StepStream,
    View,
)
from echelon.memory.recompute.recompute import backward_follows
from echelon.memory.storages import address_of, storages_of, weight_storages
from echelon.nn.autograd.saved_tensors import KeptTensor, current_hooks, current_observer, replace
from echelon.nn.batch import tensors_of
from echelon.nn.tracing import untraced
from echelon.nn.wrapping import Wrapper, Wrapping
from echelon.parallel.observer import BackwardPass, ForwardPass, Observers, Slot, StepObserver
from echelon.parallel.stage import LocalStages

_SUBJECT = "activations"
_SPARED = 32  # one part in so many of the host's memory is left to others
SMALLEST = 1024  # bytes: below, a copy costs more than the memory is worth


@final
class LayerGroup:
    def __init__(self, number: int) -> None:
        self.number = number
        self.storages: list[OffloadedStorage] = []


def offload_activations(local: LocalStages, mesh: Mesh, wrapping: Wrapping, observers: Observers) -> None:
    """Wrap the layers of this rank's stages, if the plan says so."""
    if "activations" not in mesh.plan.offload:
        return
    layers = {number: stage.layers() for number, stage in local.stages.items()}
    immediate = {
        number: len(layers[number])
        for number in local.stages
        if backward_follows(local.program, number) and not local.program.halves
    }

    def spared() -> int | None:
        free = mesh.free_host_memory()
        return None if free is None else free - total_memory() // _SPARED

    pool = HostPool(mesh.boundary, spared)
    owner = f"plan '{mesh.plan}': activations of rank {mesh.rank}"
    offload = ActivationOffload(mesh.boundary, mesh.ledger, mesh.device, pool, immediate, owner)
    observers.add(offload, outermost=True)  # what layers drop, and compute again, is not copied
    for layer in (layer for each in layers.values() for layer in each):
        weights = partial(weight_storages, list(layer.modules()))
        wrapping.wrap(OffloadedLayer(layer, offload, weights))


@final
class ActivationOffload(StepObserver):
    """Copies of one rank between device and host: stores groups behind the forward pass, one at a time, and
    fetches them ahead of the backward pass. `immediate`: the stages whose backward pass follows the forward
    pass at once, so that what the last layer and the loss save stays; and how many layers each of them
    calls."""

    def __init__(
        self,
        boundary: HostBoundary,
        ledger: Ledger,
        device: torch.device,
        pool: HostPool,
        immediate: Mapping[int, int] | None = None,
        owner: str = "activations",
    ) -> None:
        self.boundary, self.device, self.pool = boundary, device, pool
        self._ledger, self._immediate, self._owner = ledger, immediate or {}, owner
        self.current: OffloadedPass | None = None  # the forward pass that runs
        # Autograd holds a pass through its packed tensors: it goes away with the last of them.
        self._passes: WeakValueDictionary[Slot, OffloadedPass] = WeakValueDictionary()
        self._storing: deque[list[OffloadedStorage]] = deque()  # groups whose copies to the host have begun
        self.boundary.account(_SUBJECT, lambda: self.pool.pieces)

    def around_pass(self, forward: ForwardPass) -> AbstractContextManager[None] | None:
        if not torch.is_grad_enabled():
            return None
        return self.passing(forward.slot, tensors_of((forward.value, forward.inputs, forward.targets)))

    @contextmanager
    def passing(self, slot: Slot, resident: Iterable[Tensor]) -> Iterator[None]:
        """Around a forward pass and its loss. `resident`: tensors that stay on the device."""
        current = self.current = OffloadedPass(self, storages_of(resident), self._immediate.get(slot[0]))
        pack = current.pack  # one object: hooks are compared by identity
        try:
            with replace(pack, take, current_observer()):
                yield
        finally:
            self.current = None
            current.finish_forward()
        self._passes[slot] = current

    def store(self, slot: Slot) -> None:
        """The forward pass is over: store what was saved since the last layer."""
        if (of_slot := self._passes.get(slot)) is not None:
            of_slot.end_group(stays=slot[0] in self._immediate)

    def fetch(self, slot: Slot) -> None:
        """The backward pass, or a part of it, comes next: begin to fetch what it needs first."""
        if (of_slot := self._passes.get(slot)) is not None:
            of_slot.begin_backward()

    def after_backward(self, backward: BackwardPass) -> None:
        """Pause between the two halves of a backward pass."""
        of_slot = self._passes.get(backward.slot)
        if backward.half == "inputs" and backward.has_work and of_slot is not None:
            of_slot.pause_backward()

    def check_first_step(self) -> None:
        """Before the first update, refuse what does not fit a host. Later it stays on the device."""
        if self.pool.refusal is not None:
            raise UserError(
                f"{self._owner} do not fit into the memory of its host: {self.pool.refusal}; use smaller or "
                "fewer microbatches in flight, recompute=full, or drop activations from offload"
            )

    def abandon(self) -> None:
        """The step has failed: no backward pass follows."""
        self._passes.clear()
        self.release_stored()

    def store_group(self, group: LayerGroup) -> None:
        """Begin to store the storages of a layer; release those of the layer before it."""
        storages = [each for each in group.storages if each.num_users and not each.is_stored]
        ends = list(accumulate(round_up(each.num_bytes, ALIGNMENT) for each in storages))
        piece = self.pool.take(ends[-1]) if storages else None
        if piece is None:  # nothing is to be stored, or the host has no memory for it
            return
        shared = SharedPiece(self.pool, piece)
        with self._ledger.about(_SUBJECT):
            for storage, begin in zip(storages, [0, *ends], strict=False):
                storage.store(shared, begin)
        self._storing.append(storages)
        # One copy stays under way while the next layer computes: to wait for it here would stop the device.
        self.release_stored(keep=1)

    def fetch_group(self, group: LayerGroup) -> None:
        """Begin to fetch the storages of a layer that are not on the device."""
        with self._ledger.about(_SUBJECT):
            for storage in group.storages:
                if storage.num_users:
                    storage.fetch()

    def release_stored(self, *, keep: int = 0) -> None:
        """Release device memory of which the host has a copy, but for the last `keep` groups."""
        while len(self._storing) > keep:
            for storage in self._storing.popleft():
                storage.drop()


@final
class OffloadedLayer(Wrapper):
    """Marks where a layer begins and ends. A copy of a model is called as if it were not there. `weights`:
    returns the storages of its parameters and buffers now."""

    entry: ClassVar[str] = "offload"

    def __init__(
        self, module: nn.Module, offload: ActivationOffload, weights: Callable[[], set[int]]
    ) -> None:
        super().__init__(module)
        self._offload: ActivationOffload | None = offload
        self._weights: Callable[[], set[int]] | None = weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = None if self._offload is None else self._offload.current
        if current is None or self._weights is None or not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        # Other layers take the same arguments without gradients.
        shared = storages_of(tensor for tensor in tensors_of((args, kwargs)) if not tensor.requires_grad)
        current.enter_layer(self._weights() | shared)
        output = self.inner(*args, **kwargs)
        current.leave_layer()
        return output

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_offload": None, "_weights": None}


@final
class OffloadedPass:
    """`resident`: storages that stay on the device. `last_call`: the call of a layer, counted from 1, after
    which the backward pass follows at once; None if it comes later."""

    def __init__(self, offload: ActivationOffload, resident: set[int], last_call: int | None = None) -> None:
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
