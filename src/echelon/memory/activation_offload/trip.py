"""A trip: what one forward pass through a stage saves, in one group for each layer, until its backward pass.

    forward     layer 0       layer 1       layer 2              on the device: the layer that runs, and the
                     store 0 ────── store 1 ──────               one before it, until its copy is done
    backward                  layer 2       layer 1              the layer that runs, and the one that is
                     ── fetch 1 ─── fetch 0                      fetched ahead

A group ends where a layer returns; what follows the last one is the loss's. A storage that two layers save
travels with the first, and comes back for the second. What stays: weights and buffers, what the stage was
called with, arguments of a layer without gradients (masks, tables of positions: all layers share them), and
what is small.
"""

from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from echelon.memory.activation_offload.order import StepOrder
from echelon.memory.activation_offload.parcel import Mark, Parcel, View
from echelon.nn.autograd.saved_tensors import KeptTensor, current_hooks, current_observer
from echelon.nn.tracing import untraced

if TYPE_CHECKING:
    from echelon.memory.activation_offload.carrier import Carrier

SMALLEST = 1024  # bytes: below, a copy costs more than the memory is worth


@final
class Group:
    """What one layer saves."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.parcels: list[Parcel] = []


@final
class Trip:
    """`standing`: storages that are there anyway. `staying`: after how many calls of layers the backward pass
    comes at once; None if it comes later."""

    def __init__(self, carrier: "Carrier", standing: set[int], staying: int | None = None) -> None:
        self._carrier, self._standing, self._staying = carrier, standing, staying
        self._order = StepOrder(carrier.device)
        self._num_calls = 0
        self._hooks, self._observer = current_hooks(), current_observer()
        # Hooks of others decide themselves what is kept, and how.
        self._keeps_all = self._hooks is not None and self._observer is None
        self._of_layer: set[int] = set()
        self._known: dict[int, Parcel] = {}  # by storage
        self._groups: list[Group] = []
        self._open = Group(0)
        self._place: int | None = None  # the group that the backward pass has come to

    # The forward pass.

    def enter_layer(self, standing: set[int]) -> None:
        self._of_layer = standing

    def leave_layer(self) -> None:
        self._of_layer = set()
        self._num_calls += 1
        self.end_group(stays=self._num_calls == self._staying)

    def end_group(self, *, stays: bool) -> None:
        """`stays`: the backward pass comes at once."""
        group = self._open
        if group.parcels:
            self._groups.append(group)
            self._open = Group(len(self._groups))
            if not stays:
                self._carrier.send(group)

    def finish_forward(self) -> None:
        for parcel in self._known.values():
            parcel.forget_address()
        self._known, self._standing = {}, set()

    @untraced
    def pack(self, tensor: Tensor) -> "Packed | KeptTensor":
        if self._keeps_all or not self._travels(tensor):
            return KeptTensor(tensor, self._hooks)
        parcel, group = self._parcel(tensor), self._open
        if parcel not in group.parcels:
            group.parcels.append(parcel)
        mark = Mark(tensor)
        if parcel.is_stored:
            mark.finish()
        else:
            parcel.marks.append(mark)
        return Packed(self, group.number, parcel, View.of(tensor), mark)

    def _parcel(self, tensor: Tensor) -> Parcel:
        address = _address(tensor)
        known = self._known.get(address)
        # A copy that has begun does not see changes, and other tensors may have changed the storage.
        if known is not None and known.num_users and (not known.is_stored or tensor._version == 0):
            return known
        parcel = Parcel(tensor, self._open.number, self._carrier.boundary, self._order, self._observer)
        if known is not None:
            known.forget_address()
        self._known[address] = parcel
        return parcel

    def _travels(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.device != self._carrier.device:
            return False
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return False
        if type(tensor) is not Tensor or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return False
        address = _address(tensor)
        is_small = tensor.untyped_storage().nbytes() < SMALLEST
        return not is_small and address not in self._standing and address not in self._of_layer

    # The backward pass.

    def begin_backward(self) -> None:
        """Begin to bring what the last layer has saved."""
        if self._groups:
            self._come_to(len(self._groups) - 1)

    def set_aside(self) -> None:
        """The rest of the backward pass comes later: let go of what the host has."""
        self._place = None
        for group in self._groups:
            for parcel in group.parcels:
                parcel.drop()

    def need(self, parcel: Parcel, number: int) -> Tensor:
        """What a layer has saved, for its backward pass."""
        is_straggler = self._place is not None and number == self._place + 1
        if number != self._place and not is_straggler and number < len(self._groups):
            self._come_to(number)
        return parcel.value()

    def _come_to(self, number: int) -> None:
        """The backward pass is at this layer: those behind it are done, and the next one is fetched."""
        self._carrier.settle()
        self._place = number
        for group in self._groups[number + 1 :]:
            for parcel in group.parcels:
                if parcel.group > number:
                    parcel.drop()
        for group in reversed(self._groups[max(0, number - 1) : number + 1]):
            self._carrier.bring(group)


class Packed:
    """What autograd holds instead of a tensor."""

    __slots__ = ("_group", "_mark", "_parcel", "_trip", "_view")

    def __init__(self, trip: Trip, group: int, parcel: Parcel, view: View, mark: Mark) -> None:
        self._trip, self._group, self._parcel, self._view, self._mark = trip, group, parcel, view, mark
        parcel.num_users += 1

    def take(self) -> Tensor:
        self._mark.check()
        return self._view.take(self._trip.need(self._parcel, self._group))

    @untraced
    def __del__(self) -> None:
        self._parcel.end_use()


@untraced
def take(saved: Any) -> Tensor:
    tensor: Tensor = saved.take()
    return tensor


def _address(tensor: Tensor) -> int:
    """Which storage a tensor lies in."""
    return int(tensor.untyped_storage()._cdata)
