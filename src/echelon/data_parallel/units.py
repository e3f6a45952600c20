"""How the parameters of a model are divided into units: what is gathered, reduced and freed together.

A model's own layers are its units. A model that lists none is divided by size: its children, children of
lists, and children of what is too large. What is too small to be worth a message of its own, and parameters
that belong to no such child, stay with the model itself: the root unit, which surrounds the others.

A tied parameter belongs to the first unit that has it, and every module that uses it needs that unit.
"""

from collections.abc import Collection

from torch import nn

from echelon.data_parallel.parameter_set import Unit
from echelon.layering import listed_layers

SMALLEST = 16 * 2**10  # bytes: a message of this size costs about as much as an empty one
LARGEST = 512 * 2**20

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# These use their children's weights without calling the children.
_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def divide_units(
    model: nn.Module,
    smallest: int = SMALLEST,
    largest: int = LARGEST,
    only: Collection[nn.Parameter] | None = None,
) -> list[Unit]:
    """The units of `model`, in its order: by its layers if it lists them, else by size.

    `only`: divide these parameters, and leave the others to other sets.
    """
    modules = listed_layers(model) or _by_size(model, smallest, largest)
    modules = [*dict.fromkeys(modules), model]
    names = {module: name for name, module in model.named_modules()}
    name_of = {p: name for name, p in model.named_parameters() if only is None or p in only}
    owner: dict[nn.Parameter, int] = {}
    units: list[Unit] = []
    for index, module in enumerate(modules):
        parameters = [p for p in module.parameters() if p in name_of]
        own = [(name_of[p], p) for p in parameters if p not in owner]
        owner |= dict.fromkeys((p for _, p in own), index)
        # The root needs only its own parameters: the units inside it look after themselves.
        needs = sorted({owner[p] for p in parameters}) if module is not model else [index] if own else []
        units.append(Unit(names[module], module, own, needs))
    return _without_empty(units)


def _by_size(module: nn.Module, smallest: int, largest: int) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for child in module.children():
        size = sum(p.numel() * p.element_size() for p in child.parameters())
        divisible = any(True for _ in child.children()) and not isinstance(child, _OPAQUE)
        if isinstance(child, _LISTS) or (size > largest and divisible):
            modules += _by_size(child, smallest, largest)
        elif size >= smallest and not isinstance(child, nn.ParameterList | nn.ParameterDict):
            modules.append(child)  # lists of parameters are never called: whoever has them reads them
    return modules


def _without_empty(units: list[Unit]) -> list[Unit]:
    """Leave out units that own nothing and need nothing."""
    keep = [index for index, unit in enumerate(units) if unit.parameters or unit.needs]
    place = {old: new for new, old in enumerate(keep)}
    return [units[index]._replace(needs=[place[need] for need in units[index].needs]) for index in keep]
