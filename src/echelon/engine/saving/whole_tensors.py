"""Whole tensors of an engine's model, put together from what all ranks own, one after the other."""

import copy
from collections.abc import Callable, Iterator
from typing import final

from torch import Tensor

from echelon.engine.saving.engine_state import EngineState
from echelon.errors import UserError
from echelon.state.assembly import Assembly
from echelon.state.ownership import AVERAGE, ENGINE, MASTER, VALUE, OwnedSlice, Slice


@final
class WholeTensors:
    """Reads the newest state of an engine. All ranks must make the same calls."""

    def __init__(
        self, state: EngineState, synchronize: Callable[[], None], owned: Callable[[], list[OwnedSlice]]
    ) -> None:
        """`synchronize` brings every rank to the newest weights; `owned` returns what this rank owns then."""
        self._state, self._synchronize, self._owned = state, synchronize, owned

    def weights(self) -> Assembly:
        return self._assembly(lambda box: box.part == VALUE)

    def _assembly(self, chosen: Callable[[Slice], bool]) -> Assembly:
        self._synchronize()
        owned = [each for each in self._owned() if each.slice.name != ENGINE and chosen(each.slice)]
        return Assembly(owned, self._state.mesh.group("all"), self._state.mesh.device)

    def state_dict(self, to: str | None) -> dict[str, Tensor]:
        """Return all weights and buffers on every rank, or (to="rank0") in host memory of rank 0 alone."""
        if to not in (None, "rank0"):
            raise UserError(f"full_state_dict(to={to!r}): give to='rank0', or leave it out for every rank")
        whole = {name: tensor for (name, _), tensor in _tensors(self.weights(), to_first=to is not None)}
        if to is not None and self._state.mesh.rank != 0:
            return {}
        local = self._state.module.state_dict(keep_vars=True)
        # Extra state has no owner: it is as it is here.
        return {
            name: whole[first] if first in whole else copy.deepcopy(local[name])
            for name, first in self._state.names.state.items()
            if first in whole or name in local
        }

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state of each parameter, under every name that the parameter has."""
        whole: dict[str, dict[str, Tensor]] = {}
        others = (VALUE, MASTER, AVERAGE)
        for (name, part), tensor in _tensors(self._assembly(lambda box: box.part not in others)):
            whole.setdefault(name, {})[part] = tensor
        return {name: whole.get(first, {}) for name, first in self._state.names.parameters.items()}


def _tensors(assembly: Assembly, *, to_first: bool = False) -> Iterator[tuple[tuple[str, str], Tensor]]:
    for key in sorted(assembly):
        tensor = assembly.tensor(key, to=0 if to_first else None)
        if tensor is not None:
            yield key, tensor.cpu() if to_first else tensor
