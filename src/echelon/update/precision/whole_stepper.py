"""Updates of whole parameters, where each rank holds parts of them.

Of the ranks that hold parts of a parameter, one updates it for all. Parts go there and come back as boxes of
the whole parameter, all of them in one message each way:

    rank 0     a part of P, a part of Q        gradients       rank 0 updates P
    rank 1     a part of P, a part of Q          ⇄             rank 1 updates Q
                                               new weights
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.state.checkpoint.saved import SavedParameter
from echelon.state.ownership import MASTER, LocalParameter, OwnedSlice, Slice, whole_slice
from echelon.update.numbers import Flag, Number
from echelon.update.optim.local import make_local
from echelon.update.optim.optimizer_state import load_state
from echelon.update.precision.flat_memory import without_memory
from echelon.update.precision.rounding import KeyedRounding, Placement, whole_run
from echelon.update.precision.stepper import Stepper, follow, state_tensors


class PartRoute(NamedTuple):
    """Rank `rank` of the group updates this local parameter; `views` are the boxes of a tensor like it."""

    local: LocalParameter
    rank: int
    views: Callable[[Tensor], list[Tensor]]


class WholeRoute(NamedTuple):
    """Rank `rank` of the group holds these boxes of a parameter that this rank updates."""

    local: LocalParameter  # what this rank itself holds of it
    rank: int
    boxes: Sequence[Slice]


class Routes(NamedTuple):
    """Routes of parts and wholes: each list in the order of ranks, and between two ranks in one order."""

    group: Group
    parts: Sequence[PartRoute]
    wholes: Sequence[WholeRoute]
    dtype: torch.dtype  # of what is sent
    device: torch.device

    def only(self, chosen: Callable[[LocalParameter], bool]) -> "Routes":
        """The routes of parameters that are chosen, as all ranks that hold them must agree."""
        parts = [route for route in self.parts if chosen(route.local)]
        return self._replace(parts=parts, wholes=[route for route in self.wholes if chosen(route.local)])

    def collect(
        self, part: Callable[[LocalParameter], Tensor], whole: Callable[[LocalParameter], Tensor]
    ) -> None:
        self._move(self._boxes(part), self._boxes_of_wholes(whole))

    def distribute(
        self, whole: Callable[[LocalParameter], Tensor], part: Callable[[LocalParameter], Tensor]
    ) -> None:
        self._move(self._boxes_of_wholes(whole), self._boxes(part))

    def _boxes(self, part: Callable[[LocalParameter], Tensor]) -> "_Boxes":
        return [(route.rank, box) for route in self.parts for box in route.views(part(route.local))]

    def _boxes_of_wholes(self, whole: Callable[[LocalParameter], Tensor]) -> "_Boxes":
        return [(route.rank, whole(route.local)[box.box]) for route in self.wholes for box in route.boxes]

    def _move(self, sources: "_Boxes", targets: "_Boxes") -> None:
        outgoing = torch.cat([self._empty(0), *(box.flatten().to(self.dtype) for _, box in sources)])
        incoming = self._empty(sum(box.numel() for _, box in targets))
        with self.group.ledger.about("optimizer"):
            self.group.all_to_all(incoming, outgoing, self._counts(targets), self._counts(sources))
        pieces = incoming.split([box.numel() for _, box in targets])
        for (_, box), piece in zip(targets, pieces, strict=True):
            box.copy_(piece.view(box.shape))

    def _counts(self, boxes: "_Boxes") -> list[int]:
        counts = [0] * self.group.size
        for rank, box in boxes:
            counts[rank] += box.numel()
        return counts

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)


_Boxes = list[tuple[int, Tensor]]  # each with the rank that it goes to, or comes from


@final
class WholeStepper(Stepper):
    """The optimizer works on whole parameters, each on one of the ranks that hold it. `masters`: they stay
    here between updates, in float32. Else they are put together for each update; with `rounding` in float32,
    and what goes back is rounded."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        routes: Routes,
        *,
        masters: bool,
        rounding: KeyedRounding | None = None,
        deferred: bool = False,
    ) -> None:
        self._routes, self._masters, self._rounding = routes, masters, rounding
        in_float32 = masters or rounding is not None
        self._wholes = {route.local: _without_memory(route, in_float32) for route in routes.wholes}
        self._placements = {
            local: Placement.of(local.name, [whole_run(whole)]) for local, whole in self._wholes.items()
        }
        self._is_here: set[LocalParameter] = set()  # whose weights the rank that updates them has
        self._changed: set[LocalParameter] = set()  # of these, those that the user has changed since
        held = {local.parameter: [whole] for local, whole in self._wholes.items()}
        super().__init__(make_local(optimizer, held), deferred=deferred)

    def start_update(self, number: int) -> None:
        if self._rounding is not None:
            self._rounding.start_update(number)

    def step(self, factor: Number, skip: Flag = False, unit: Sequence[LocalParameter] | None = None) -> None:
        chosen = None if unit is None else {each.tensor for each in unit}
        routes = self._routes.only(
            lambda local: local.tensor.grad is not None and (chosen is None or local.tensor in chosen)
        )
        updated = list(dict.fromkeys(self._wholes[route.local] for route in routes.wholes))
        # Masters of all parameters, as one device has them: also of those that no update ever reaches.
        present = self._routes
        if chosen is not None and self.by_unit:  # the weights that are on the device
            present = present.only(lambda local: local.tensor in chosen)
        self._bring_weights(present if self._masters else routes)
        if self._changed:  # on all ranks alike
            self._follow_changes()
        for whole in updated:
            whole.grad = torch.zeros_like(whole)
        routes.collect(_gradient, lambda local: _gradient_of(self._wholes[local]))
        self._call(updated, factor, skip)
        for whole in updated:
            whole.grad = None
        results = {whole: whole.detach() for whole in updated}
        if self._rounding is not None:
            results = self._rounded(routes)
        routes.distribute(lambda local: results[self._wholes[local]], lambda local: local.tensor.detach())
        if not self._masters:  # until the next update the user may change them
            self._is_here.clear()
            for whole in updated:
                whole.data = without_memory(whole, whole.dtype)

    def _rounded(self, routes: Routes) -> dict[nn.Parameter, Tensor]:
        """The new weights of what was updated, in the type of the weights."""
        assert self._rounding is not None
        results = {}
        for local in dict.fromkeys(route.local for route in routes.wholes):
            whole = self._wholes[local]
            results[whole] = torch.empty(whole.shape, dtype=local.tensor.dtype, device=whole.device)
            self._rounding.round(results[whole], whole, self._placements[local])
        return results

    def _bring_weights(self, routes: Routes) -> None:
        new = routes.only(lambda local: local not in self._is_here)
        for whole in dict.fromkeys(self._wholes[route.local] for route in new.wholes):
            whole.data = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
        new.collect(lambda local: local.tensor.detach(), lambda local: self._wholes[local].detach())
        self._is_here.update(route.local for route in new.parts)

    def take_over(self, local: Sequence[LocalParameter]) -> None:
        self._changed.update(self._is_here.intersection(local))

    def _follow_changes(self) -> None:
        """Masters take the elements that the user has changed."""
        changed = self._routes.only(lambda local: local in self._changed)
        wholes = dict.fromkeys(route.local for route in changed.wholes)
        copies = {local: torch.empty_like(self._wholes[local]) for local in wholes}
        changed.collect(lambda local: local.tensor.detach(), lambda local: copies[local])
        for local, copy in copies.items():
            follow(self._wholes[local].detach(), copy.to(local.tensor.dtype))
        self._changed.clear()

    @torch.no_grad()
    def load(self, local: LocalParameter, saved: SavedParameter) -> None:
        if self._masters:
            self._is_here.add(local)  # on all ranks alike
        whole = self._wholes.get(local)
        if whole is None:
            return
        if self._masters:
            whole.data = saved.whole(saved.finest).to(whole.device, whole.dtype)
        strides = torch.empty(whole.shape, device="meta").stride()
        load_state(self.optimizer, whole, strides, saved, saved.parts.keys())

    def updated_tensors(self) -> list[tuple[str, nn.Parameter]]:
        return [(local.name, whole) for local, whole in self._wholes.items()]

    def held_whole(self) -> list[OwnedSlice]:
        owned = []
        for local, whole in self._wholes.items():
            state = state_tensors(self.optimizer, whole)
            if self._masters and local in self._is_here:
                state[MASTER] = whole.detach()
            owned += [
                OwnedSlice(whole_slice(local.name, value, part), value) for part, value in state.items()
            ]
        return owned


def _without_memory(route: WholeRoute, in_float32: bool) -> nn.Parameter:
    like = route.local.tensor
    whole = torch.empty(route.boxes[0].shape, device="meta")
    return nn.Parameter(without_memory(whole, torch.float32 if in_float32 else like.dtype, like.device))


def _gradient_of(tensor: nn.Parameter) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _gradient(local: LocalParameter) -> Tensor:
    return _gradient_of(local.tensor)
