"""offload=activations: tensors that layers save go to host memory, and come back for the backward pass."""

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
from echelon.memory.activation_offload.offloaded_pass import LayerGroup, OffloadedPass, take
from echelon.memory.activation_offload.offloaded_storage import HostPool, OffloadedStorage, SharedPiece
from echelon.memory.recompute.recompute import backward_follows
from echelon.memory.storages import storages_of, weight_storages
from echelon.nn.autograd.saved_tensors import current_observer, replace
from echelon.nn.batch import tensors_of
from echelon.nn.wrapping import Wrapper, Wrapping
from echelon.parallel.observer import BackwardPass, ForwardPass, Observers, Slot, StepObserver
from echelon.parallel.stage import LocalStages

_SUBJECT = "activations"
_SPARED = 32  # one part in so many of the host's memory is left to others


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
    pool = HostPool(mesh.boundary, lambda: _spared(mesh.free_host_memory()))
    owner = f"plan '{mesh.plan}': activations of rank {mesh.rank}"
    offload = ActivationOffload(mesh.boundary, mesh.ledger, mesh.device, pool, immediate, owner)
    observers.add(offload, outermost=True)  # what layers drop, and compute again, is not copied
    for layer in (layer for each in layers.values() for layer in each):
        weights = partial(weight_storages, list(layer.modules()))
        wrapping.wrap(OffloadedLayer(layer, offload, weights))


def _spared(available: int | None) -> int | None:
    return None if available is None else available - total_memory() // _SPARED


@final
class ActivationOffload(StepObserver):
    """Copies of one rank between device and host: stores groups behind the forward pass, one at a time, and
    fetches them ahead of the backward pass.

    `immediate`: the stages whose backward pass follows the forward pass at once, so that what the last layer
    and the loss save stays; and how many layers each of them calls.
    """

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
    """Marks where a layer begins and ends. A copy of a model is called as if it were not there.

    `weights`: returns the storages of its parameters and buffers now.
    """

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
