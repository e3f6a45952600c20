"""Layers of the skeleton with whole weights, put together from all ranks: one unit at a time is in memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from echelon.assembly import Assembly
from echelon.collectives import Group
from echelon.ownership import VALUE, OwnedSlice

Weights = dict[nn.Parameter, nn.Parameter]  # from the skeleton's, without memory, to those that have it


class WholeWeights:
    """The weights of a stage; the ranks of `group` hold all parts of them, and ask for the same ones."""

    def __init__(
        self, skeleton: nn.Module, owned: Sequence[OwnedSlice], group: Group, device: torch.device
    ) -> None:
        self._names = {parameter: name for name, parameter in skeleton.named_parameters()}
        self._assembly = Assembly(owned, group, device)
        self._held = {name for name, _ in self._assembly}

    def name(self, parameter: nn.Parameter) -> str:
        return self._names[parameter]

    def has(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are the skeleton's, and weights of this stage."""
        return all(self._names.get(parameter) in self._held for parameter in parameters)

    def assemble(self, parameters: Sequence[nn.Parameter]) -> Weights:
        """On all ranks of the group together."""
        weights: Weights = {}
        for parameter in parameters:
            tensor = self._assembly.tensor((self._names[parameter], VALUE))
            assert tensor is not None
            is_trained = tensor.is_floating_point() or tensor.is_complex()
            weights[parameter] = nn.Parameter(tensor, requires_grad=is_trained)
        return weights


@contextmanager
def with_weights(
    modules: Sequence[nn.Module], weights: Mapping[nn.Parameter, nn.Parameter]
) -> Iterator[None]:
    """Inside, modules of the skeleton have these weights; tied ones together."""
    places = [
        (owner, name, parameter)
        for module in modules
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter in weights
    ]
    for owner, name, parameter in places:
        owner._parameters[name] = weights[parameter]
    try:
        yield
    finally:
        for owner, name, parameter in places:
            owner._parameters[name] = parameter


def in_a_row(modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """Calls the first with the arguments, and each of the others with what the one before returned."""

    def call(*args: Any, **kwargs: Any) -> Any:
        first, *others = modules
        value = first(*args, **kwargs)
        for module in others:
            value = module(value)
        return value

    return call


class Replaced:
    """Weights that start at zero would hide what is done with them: while open, they have other values."""

    def __init__(self, weights: Weights, local: Mapping[nn.Parameter, "Place"]) -> None:
        """`local`: where this rank has its part of a weight of the skeleton, if its memory is there."""
        self._zeros = [
            (local[parameter], weight)
            for parameter, weight in weights.items()
            if parameter in local and weight.is_floating_point() and not bool(weight.detach().any())
        ]

    def __enter__(self) -> None:
        for place, weight in self._zeros:
            generator = torch.Generator().manual_seed(weight.numel())
            values = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.1
            weight.data.copy_(values)
            place.parameter.data.copy_(place.take(weight.data))

    def __exit__(self, *_: object) -> None:
        for place, _weight in self._zeros:
            place.parameter.data.zero_()


class Place:
    """This rank's part of a weight."""

    def __init__(self, parameter: nn.Parameter, take: Callable[[Tensor], Tensor]) -> None:
        self.parameter, self.take = parameter, take

    @property
    def has_memory(self) -> bool:
        return self.parameter.untyped_storage().size() >= self.parameter.nbytes
