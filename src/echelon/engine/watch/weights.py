"""Weights that the user changes by hand between two steps: found by version and address, and taken over.

    in place            weight.clamp_(…), load_state_dict, weight.data.clamp_(…)      its version is another
    other memory        weight.data = tensor                                          its address is another

The model's weights are then what the user wrote. What the engine keeps beside them (flat shards, float32
masters, twins in host memory) takes the new values: masters those of elements that are others now.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, final

import torch
from torch import nn

from echelon.errors import UserError
from echelon.parallel.data.zero.weight_access import FreedParameter


class _State(NamedTuple):
    """Of each weight that is whole between steps."""

    versions: list[int]
    addresses: list[int]


@final
class WeightWatch:
    """Compares the weights of this rank with what they were after the last step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._forms = {name: (p.shape, p.dtype, p.device) for name, p in parameters.items()}
        self.record()

    def record(self) -> None:
        """Take the weights of now for those that the engine has made. Those that come and go, or are on
        their way, are their owners' to watch."""
        self._standing = {n: p for n, p in self._parameters.items() if p.__class__ is not FreedParameter}
        self._state = self._read()

    def _read(self) -> _State:
        standing = self._standing.values()
        with torch._C.DisableTorchFunctionSubclass():  # some may have been freed since
            return _State([p._version for p in standing], [p.data_ptr() for p in standing])

    def changed(self) -> dict[str, nn.Parameter]:
        """Those that somebody has changed, by name."""
        now = self._read()
        if now == self._state:
            return {}
        pairs = zip(
            zip(*now, strict=True), zip(*self._state, strict=True), self._standing.items(), strict=True
        )
        return {name: p for new, old, (name, p) in pairs if new != old}

    def check_forms(self, names: Iterable[str]) -> None:
        """Refuse memory of another form."""
        for name in names:
            parameter = self._parameters[name]
            form = (parameter.shape, parameter.dtype, parameter.device)
            if form != self._forms[name]:
                shape, dtype, device = self._forms[name]
                raise UserError(
                    f"{name} is {tuple(parameter.shape)} of {parameter.dtype} on {parameter.device} now, "
                    f"and parallelize was given {tuple(shape)} of {dtype} on {device}; give it that form"
                )
