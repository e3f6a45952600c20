"""What the audit of layers compares: modules of which each rank runs its part, with the whole ones.

The layers of a stage; in a model that runs its own forward, the members of its lists and what is beside them.
A unit whose inputs or outputs are themselves divided (a column alone) cannot be compared. Then the whole
stage is, which begins and ends with whole values.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from echelon.layering import listed_layers
from echelon.pipeline_parallel import StageModule
from echelon.tensor_parallel.modules import EnterFirst, SplitModule
from echelon.wrapping import find_wrapper

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class AuditUnit(NamedTuple):
    """A module as this rank runs it, and the modules of the skeleton that do the same in a row."""

    name: str
    module: nn.Module
    originals: Sequence[nn.Module]
    is_first: bool  # of the model

    @property
    def original_parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for module in self.originals for p in module.parameters()))


class StageUnits(NamedTuple):
    """The units of a stage, and all of it as one."""

    units: list[AuditUnit]
    whole: AuditUnit


def find_units(stage: nn.Module, skeleton: nn.Module, first_layer: int) -> StageUnits:
    """`first_layer`: the number of the first layer of this stage in the model."""
    if not isinstance(stage, StageModule):
        whole = AuditUnit(type(stage).__name__, stage, [skeleton], is_first=True)
        paths = list(_paths(stage, "", is_root=True))
        units = [
            AuditUnit(path, stage.get_submodule(path), [skeleton.get_submodule(path)], is_first=False)
            for path in paths
        ]
        return StageUnits(units or [whole], whole)
    layers = stage.layers()
    names = {module: name for name, module in skeleton.named_modules()}
    originals = listed_layers(skeleton)[first_layer : first_layer + len(layers)]
    numbers = range(first_layer, first_layer + len(layers))
    units = [
        AuditUnit(f"layer {number} ({_name_of(original, names)})", layer, [original], is_first=number == 0)
        for number, layer, original in zip(numbers, layers, originals, strict=True)
    ]
    whole_name = f"layers {numbers[0]} to {numbers[-1]}"
    return StageUnits(units, AuditUnit(whole_name, stage, originals, is_first=first_layer == 0))


def _name_of(layer: nn.Module, names: Mapping[nn.Module, str]) -> str:
    """That of the layer, or of the first module in it: layers may be made on the fly."""
    return next((names[module] for module in layer.modules() if module in names), type(layer).__name__)


def _paths(module: nn.Module, path: str, *, is_root: bool = False) -> Iterator[str]:
    """The units inside of a module that is no unit itself, else its own path."""
    inside = [(name, child) for name, child in module.named_children() if _is_split(child)]
    lists = [child for child in module.modules() if child is not module and isinstance(child, _LISTS)]
    if isinstance(module, _LISTS):
        yield from (_join(path, name) for name, _ in inside)
    elif not _enters(module) and (is_root or any(map(_is_split, lists))):
        for name, child in inside:
            yield from _paths(child, _join(path, name))
    elif not is_root:
        yield path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_split(module: nn.Module) -> bool:
    return any(find_wrapper(inside, SplitModule) is not None for inside in module.modules())


def _enters(module: nn.Module) -> bool:
    """Whether its input is that of all columns inside: only here is its gradient whole."""
    return any(isinstance(hook, EnterFirst) for hook in module._forward_pre_hooks.values())
