"""New weights of a rank that holds whole parameters, on their way from the host: waited for when first used.

A module waits for the weights of its unit when it is called. Whoever reads a weight in another way (the user
between two steps, a module that reads the weight of another one) waits for that: until it is there, it is a
`FreedParameter`.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch import nn

from echelon.nn.tracing import untraced
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.parameter_set import ParameterSet
from echelon.parallel.data.zero.freed import FreedParameter, mark_whole, register_owner
from echelon.state.ownership import LocalParameter

Wait = Callable[[Sequence[LocalParameter]], None]


@final
class NewWeights:
    """Watches the parameters of one set."""

    def __init__(
        self, parameter_set: ParameterSet, local: Sequence[LocalParameter], wait: Wait, wrapping: Wrapping
    ) -> None:
        """`wait`: returns when the new weights of local parameters are there."""
        self._wait = wait
        self._local = {each.parameter: each for each in local}
        self._names = {each.name: each for each in local}
        for each in local:
            register_owner(each.parameter, each.name, self._read)
        for unit in parameter_set.units:
            parameters = [p for need in unit.needs for _, p in parameter_set.units[need].parameters]
            needed = [self._local[p] for p in parameters if p in self._local]
            if needed:
                wrapping.before("offload", unit.module, self._before(needed), with_kwargs=True, prepend=True)

    def hide(self) -> None:
        """Nobody may read any of them any more."""
        self.expect(list(self._local.values()))

    def expect(self, local: Sequence[LocalParameter]) -> None:
        """New weights of these will come: nobody may read the old ones."""
        for each in local:
            if each.parameter in self._local and each.parameter.numel():
                each.parameter.__class__ = FreedParameter

    def arrive(self, local: Sequence[LocalParameter]) -> None:
        """They are there."""
        for each in local:
            if each.parameter in self._local:
                mark_whole(each.parameter)

    def _before(self, needed: Sequence[LocalParameter]) -> Callable[..., None]:
        @untraced
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG001
            self._wait(needed)

        return hook

    def _read(self, name: str) -> None:
        self._wait([self._names[name]])


@final
class ResidentWeights:
    """Weights that are whole on every rank, and that ranks wait for together when they share them."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], check: Callable[[], None]) -> None:
        """`check`: raises when nobody may read them any more."""
        self._check = check
        self._parameters = [parameter for _, parameter in parameters if parameter.numel()]
        for name, parameter in parameters:
            register_owner(parameter, name, self._read)

    def hide(self) -> None:
        """Nobody may read any of them any more."""
        for parameter in self._parameters:
            parameter.__class__ = FreedParameter

    def _read(self, name: str) -> None:  # noqa: ARG002
        self._check()
