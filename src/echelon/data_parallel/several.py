"""Several models on one rank as one: each agrees with its replicas in its own way and at its own time."""

from collections.abc import Sequence, Set
from typing import final

from torch import Tensor, nn

from echelon.data_parallel.sync import NOTHING, Storages, Sync
from echelon.ownership import Held, Owned, Slice


@final
class Several(Sync):
    """The parts' backward passes are announced to the parts themselves; all else to all of them."""

    def __init__(self, parts: Sequence[Sync]) -> None:
        self._parts = list(parts)
        self.sharded = any(part.sharded for part in parts)
        self.lockstep = any(part.lockstep for part in parts)
        self._part_of = {id(held.tensor): part for part in parts for held in part.held()}

    def parameters(self) -> list[nn.Parameter]:
        return [p for part in self._parts for p in part.parameters()]

    def held(self) -> list[Held]:
        return [held for part in self._parts for held in part.held()]

    def start_step(self) -> None:
        for part in self._parts:
            part.start_step()

    def start_backward(self, *, last: bool) -> None:  # noqa: ARG002
        raise AssertionError("a backward pass is one part's")

    def finish_backward(self) -> None:
        raise AssertionError("a backward pass is one part's")

    def finish_gradients(self) -> None:
        for part in self._parts:
            part.finish_gradients()

    def norm_share(self, without: Set[nn.Parameter] = NOTHING) -> list[Tensor]:
        return [gradient for part in self._parts for gradient in part.norm_share(without)]

    def finish_step(self) -> None:
        for part in self._parts:
            part.finish_step()

    def owned(self) -> list[Owned]:
        return [owned for part in self._parts for owned in part.owned()]

    def slices(self, held: Held) -> list[Slice]:
        return self._part_of[id(held.tensor)].slices(held)

    def storages(self) -> Storages:
        whole = Storages([], [])
        for part in self._parts:
            its = part.storages()
            whole.parameters.extend(its.parameters)
            whole.gradients.extend(its.gradients)
        return whole

    def renew(self) -> None:
        for part in self._parts:
            part.renew()
