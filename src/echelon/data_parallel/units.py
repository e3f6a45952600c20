"""How a model is cut into units: parameters that are gathered, reduced and freed together.

A model's own layers are its units. A model that lists none is cut by size: its children, children of lists,
and children of what is too large. What is too small to be worth a message of its own, and parameters that
belong to no such child, stay with the model itself: the root unit, which surrounds the others.

A tied parameter belongs to the first unit that has it, and every module that uses it needs that unit.
"""

from typing import NamedTuple

from torch import nn

from echelon.layering import listed_layers

SMALLEST = 16 * 2**10  # bytes: a message of this size costs about as much as an empty one
LARGEST = 512 * 2**20

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# These use their children's weights without calling the children.
_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class UnitPlan(NamedTuple):
    """One unit to be: the module that it is whole for, and the parameters that are its own."""

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]]


class Cut(NamedTuple):
    """A model in units, in the order of the model, and the units that each unit's module needs."""

    units: list[UnitPlan]
    needs: list[list[int]]


def cut_units(model: nn.Module, smallest: int = SMALLEST, largest: int = LARGEST) -> Cut:
    """Cut `model` by its layers if it lists them, else by size."""
    modules = listed_layers(model) or _by_size(model, smallest, largest)
    modules = [*dict.fromkeys(modules), model]
    names = {module: name for name, module in model.named_modules()}
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    owner: dict[nn.Parameter, int] = {}
    units: list[UnitPlan] = []
    for index, module in enumerate(modules):
        own = [(name_of[p], p) for p in module.parameters() if p not in owner]
        owner |= dict.fromkeys((p for _, p in own), index)
        units.append(UnitPlan(names[module], module, own))
    # The root needs only what is its own: the units inside it look after themselves.
    needs = [sorted({owner[p] for p in unit.module.parameters()}) for unit in units[:-1]]
    needs.append([len(units) - 1] if units[-1].parameters else [])
    return _without_empty(Cut(units, needs))


def _by_size(module: nn.Module, smallest: int, largest: int) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        size = sum(p.numel() * p.element_size() for p in child.parameters())
        divisible = any(True for _ in child.children()) and not isinstance(child, _OPAQUE)
        if isinstance(child, _LISTS) or (size > largest and divisible):
            found += _by_size(child, smallest, largest)
        elif size >= smallest and not isinstance(child, nn.ParameterList | nn.ParameterDict):
            found.append(child)  # lists of parameters are never called: whoever has them reads them
    return found


def _without_empty(cut: Cut) -> Cut:
    """Leave out units that own nothing and need nothing."""
    keep = [index for index, unit in enumerate(cut.units) if unit.parameters or cut.needs[index]]
    place = {old: new for new, old in enumerate(keep)}
    return Cut(
        [cut.units[index] for index in keep],
        [[place[need] for need in cut.needs[index]] for index in keep],
    )
