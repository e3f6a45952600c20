"""Versions of a stage's weights: older ones stay as they were while the newest moves on.

A forward never uses the parameters themselves but views of a version's memory, through which gradients reach
the parameters. An update of weights that are still in use is given new memory to write to (`stash`), so
the old version costs no copy of its own: as many versions as are in use are in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


class _OfVersion(torch.autograd.Function):
    """A parameter, with the values of one of its versions."""

    @staticmethod
    def forward(ctx: FunctionCtx, parameter: Tensor, values: Tensor) -> Tensor:  # noqa: ARG004
        ctx.set_materialize_grads(False)  # where none comes, there is none
        return values.view_as(values)

    @staticmethod
    def backward(_: FunctionCtx, *gradients: Any) -> Any:
        return gradients[0], None


class Versions:
    """The versions of the weights of some stages, numbered by updates since the pipeline was empty."""

    def __init__(self, stages: Sequence[nn.Module], reallocate: Callable[[], None]) -> None:
        """`reallocate` moves the newest weights to new memory; the old lives as long as it is stashed."""
        self._reallocate = reallocate
        self._modules = [module for stage in stages for module in stage.modules()]
        self._parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
        self._stashed: dict[int, dict[nn.Parameter, Tensor]] = {}
        self.newest = 0

    @property
    def num_alive(self) -> int:
        return 1 + len(self._stashed)

    def stash(self, version: int) -> None:
        """Keep the newest weights, since an update is about to replace them."""
        assert version == self.newest, (version, self.newest)
        # Each `p.data` is a tensor of its own over the old memory, and stays so when the parameter is moved.
        self._stashed[version] = {p: p.data for p in self._parameters}
        self._reallocate()

    def pop(self, version: int) -> None:
        del self._stashed[version]

    def storages(self) -> list[Tensor]:
        return [values for version in self._stashed.values() for values in version.values()]

    def restart(self) -> None:
        """The pipeline is empty: count again from the weights of now."""
        self._stashed = {}
        self.newest = 0

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Modules see the weights of `version`."""
        values = self._stashed.get(version)
        assert values is not None or version == self.newest, f"version {version} is gone or not there yet"
        see: Callable[[Tensor, Tensor], Tensor] = _OfVersion.apply
        seen = {p: see(p, p.data if values is None else values[p]) for p in self._parameters}
        # Into the dicts: `setattr` of a module refuses a tensor in the place of a parameter.
        places = [
            (module._parameters, name, p)
            for module in self._modules
            for name, p in module._parameters.items()
            if p is not None and p in seen
        ]
        for holder, name, parameter in places:
            holder[name] = seen[parameter]  # type: ignore[assignment]
        try:
            with _in_recurrent(self._modules, seen):
                yield
        finally:
            for holder, name, parameter in places:
                holder[name] = parameter


@contextmanager
def _in_recurrent(modules: Sequence[nn.Module], seen: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Replace the weights in the second list of them that forwards of torch's recurrent modules read."""
    lists = [(module, module._flat_weights) for module in modules if isinstance(module, nn.RNNBase)]
    for module, weights in lists:
        module._flat_weights = [seen.get(weight, weight) for weight in weights]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for module, weights in lists:
            module._flat_weights = weights
