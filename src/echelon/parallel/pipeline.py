"""A model split into stages: consecutive layers, of which a rank keeps its own.

Every rank builds the whole model and drops the layers of other ranks. Stages of a model that only calls its
layers, with code around them, are in called_stage.py. The model's tree stays, with None where
their weights were, so that names stay what they are. A parameter that several stages use is *tied*: each of
them holds it.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.errors import UserError
from echelon.nn.layering import how_to_list, listed_layers, stage_layers
from echelon.parallel.called_stage import CalledStage, Names


class StageModule(nn.Module):
    """Consecutive layers, called one after the other; parameters keep the names that the model gives them."""

    def __init__(self, layers: Sequence[nn.Module], names: Names) -> None:
        super().__init__()
        self._layers = nn.ModuleList(layers)
        self._names = names

    def layers(self) -> list[nn.Module]:
        return list(self._layers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first layer takes the arguments, and each other what the one before returned."""
        first, *others = self._layers
        value = first(*args, **kwargs)
        for layer in others:
            value = layer(value)
        return value

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for parameter in self._layers.parameters():
            yield self._names.parameters[parameter], parameter

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        for module in self._layers.modules():
            for name, buffer in module.named_buffers(recurse=False):
                yield self._names.buffer(module, name), buffer


class Tie(NamedTuple):
    name: str
    parameter: nn.Parameter
    stages: tuple[int, ...]


class ModelSplit(NamedTuple):
    """A model in stages, and what ties them."""

    stages: list[StageModule] | list[CalledStage]
    ties: list[Tie]


def split_model(model: nn.Module, boundaries: Sequence[int]) -> ModelSplit:
    layers, names = stage_layers(model), Names.of(model)
    edges = [0, *boundaries, len(layers)]
    stages: list[StageModule] | list[CalledStage]
    if listed_layers(model):
        _check_names(model, layers, names)
        stages = [StageModule(layers[a:b], names) for a, b in pairwise(edges)]
    else:
        stages = [CalledStage(model, layers, a, b, names) for a, b in pairwise(edges)]
    users: dict[nn.Parameter, list[int]] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.parameters():
            users.setdefault(parameter, []).append(number)
    ties = [
        Tie(names.parameters[parameter], parameter, tuple(numbers))
        for parameter, numbers in users.items()
        if len(numbers) > 1
    ]
    return ModelSplit(stages, ties)


def even_boundaries(model: nn.Module, stages: int) -> list[int]:
    """Return the boundaries of stages of equally many layers; the first ones may have one more."""
    num_layers = len(stage_layers(model))
    if num_layers == 0:
        raise UserError(
            f"pipeline: {type(model).__name__} lists no layers to cut between; {how_to_list(model)}"
        )
    if num_layers < stages:
        raise UserError(
            f"pipeline: {num_layers} layers of {type(model).__name__} cannot make {stages} stages, which "
            f"need one each; use fewer stages (pipeline × chunks ≤ {num_layers}), or split the model finer"
        )
    base, more = divmod(num_layers, stages)
    return [number * base + min(number, more) for number in range(1, stages)]


def check_boundaries(model: nn.Module, boundaries: Sequence[int], stages: int) -> list[int]:
    """`boundaries`, if they split the model into `stages` stages of at least one layer."""
    edges = [0, *boundaries, len(stage_layers(model))]
    rising = all(a < b for a, b in pairwise(edges))
    if len(boundaries) != stages - 1 or not rising:
        raise UserError(
            f"boundaries={list(boundaries)}: {stages} stages of {edges[-1]} layers take {stages - 1} rising "
            f"numbers between 1 and {edges[-1] - 1}, the layers before which stages begin"
        )
    return list(boundaries)


def _check_names(model: nn.Module, layers: Sequence[nn.Module], names: Names) -> None:
    """Every parameter must be in a layer, and every layer's in the model."""
    in_layers = {parameter for layer in layers for parameter in layer.parameters()}
    outside = [name for parameter, name in names.parameters.items() if parameter not in in_layers]
    if outside:
        raise UserError(
            f"pipeline: {', '.join(outside)} of {type(model).__name__} belong to no layer, so no stage would "
            "hold them; move them into one of the layers that layers() returns"
        )
    unnamed = [
        type(module).__name__
        for layer in layers
        for module in layer.modules()
        if module not in names.modules and _keeps_something(module)
    ]
    if unnamed or not in_layers <= names.parameters.keys():
        raise UserError(
            f"pipeline: layers() of {type(model).__name__} returns {', '.join(unnamed) or 'modules'}, with "
            "weights, buffers or dropout that the model itself does not have; assign these modules to the "
            "model, so that they have names"
        )


def _keeps_something(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return bool(own) or (isinstance(module, _DropoutNd) and module.p > 0)


def keep_only(model: nn.Module, stages: Sequence[nn.Module], kept: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Drop all parameters and buffers of other stages; buffers that are in no layer stay on every rank.
    Returns the buffers that no state dict has, by name: nothing could bring them back otherwise."""
    temporary: dict[str, Tensor] = {}
    modules = {module for stage in kept for module in stage.modules()}
    others = {module for stage in stages for module in stage.modules()} - modules
    parameters = {parameter for stage in kept for parameter in stage.parameters()}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in parameters:
                module._parameters[name] = None
        if module in others:
            for name, buffer in module._buffers.items():
                if buffer is not None and name in module._non_persistent_buffers_set:
                    temporary[f"{path}.{name}" if path else name] = buffer
                module._buffers[name] = None
    return temporary
