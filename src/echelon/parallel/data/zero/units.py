"""Divide the parameters of a model into units: what is gathered, reduced and freed together.

A model's own layers are its units. A model that lists none, or that makes them on the fly while its own
forward runs (transformers), is divided by size: its children, children of lists, and children of what is too
large or holds a list of blocks; layers that its forward is known to call are units of any size. What is too
small to be worth a message of its own, and parameters that belong to no such child, stay with the model
itself: the root unit, which surrounds the others.

A tied parameter belongs to the first unit that has it, and every module that uses it needs that unit.
"""

from collections.abc import Collection, Sequence

from torch import nn

from echelon.collectives.buffer_layout import portions
from echelon.nn.layering import called_layers, listed_layers
from echelon.parallel.data.parameter_set import Unit

SMALLEST = 16 * 2**10  # bytes: a message of this size costs about as much as an empty one
LARGEST = 512 * 2**20
SMALLEST_MESSAGE = 2**20  # bytes: below it, what a message costs the host is more than what its bytes cost

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# These are never called: the modules that have them read them.
_PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)

# These use their children's weights without calling the children.
_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def divide_units(
    model: nn.Module,
    smallest: int = SMALLEST,
    largest: int = LARGEST,
    only: Collection[nn.Parameter] | None = None,
) -> list[Unit]:
    """The units of `model`, in its order: by its layers if it lists them, else by size. `only`: divide these
    parameters, and leave the others to other sets."""
    names = {module: name for name, module in model.named_modules()}
    modules = unit_modules(model, smallest, largest)
    modules += [*_tied_outside(model, modules), model]
    name_of = {p: name for name, p in model.named_parameters() if only is None or p in only}
    owner: dict[nn.Parameter, int] = {}
    units: list[Unit] = []
    for index, module in enumerate(modules):
        parameters = [p for p in module.parameters() if p in name_of]
        own = [(name_of[p], p) for p in parameters if p not in owner]
        owner |= dict.fromkeys((p for _, p in own), index)
        # The root needs what it reads itself: the units inside it look after themselves.
        read = _outside_parameters(model, modules[:-1]) if module is model else parameters
        units.append(Unit(names[module], module, own, sorted({owner[p] for p in read if p in owner})))
    return _without_empty(units)


def merge_units(units: Sequence[Unit], largest: int = SMALLEST_MESSAGE) -> list[Unit]:
    """Join units below this size to their neighbours, where none is gathered for a use: there a unit is what
    one message brings, and no module waits for it."""
    joined = portions(units, _unit_bytes, largest)
    return [
        Unit(each[0].name, each[-1].module, [p for unit in each for p in unit.parameters], [place])
        for place, each in enumerate(joined)
    ]


def _unit_bytes(unit: Unit) -> int:
    return sum(p.numel() * p.element_size() for _, p in unit.parameters)


def unit_modules(model: nn.Module, smallest: int = SMALLEST, largest: int = LARGEST) -> list[nn.Module]:
    """The modules that are units, without the model itself: the layers that it lists, or those by size."""
    own = set(model.modules())
    layers = [layer for layer in listed_layers(model) if layer in own]
    called = called_layers(model)
    fixed = frozenset(called.layers if called is not None else ())
    return list(dict.fromkeys(layers or _by_size(model, smallest, largest, fixed)))


def find_root(units: Sequence[Unit]) -> int | None:
    """The unit whose module surrounds those of the others, if there is one."""
    last = len(units) - 1
    inside = set(units[last].module.modules()) if units else set()
    return last if len(units) > 1 and all(unit.module in inside for unit in units) else None


def backward_order(units: Sequence[Unit]) -> list[int]:
    """The order in which a backward pass is expected to complete units: the reverse of the model's. What the
    root has may be used at both ends of the model, or never: it comes last."""
    order = list(reversed(range(len(units))))
    root = find_root(units)
    return [index for index in order if index != root] + ([] if root is None else [root])


def _by_size(
    module: nn.Module,
    smallest: int,
    largest: int,
    fixed: frozenset[nn.Module],
    divided: tuple[type, ...] = (nn.ModuleList, nn.Sequential),
) -> list[nn.Module]:
    """`fixed`: modules that are units of any size. `divided`: lists at whose blocks a child is cut."""
    modules: list[nn.Module] = []
    for child in module.children():
        size = _num_bytes(child)
        divisible = any(True for _ in child.children()) and not isinstance(child, _OPAQUE)
        if child in fixed:
            modules.append(child)
        elif isinstance(child, _LISTS):
            # Which members of a list inside of a block run may depend on data (experts), and then they must
            # be whole together; all of a Sequential runs.
            modules += _by_size(child, smallest, largest, fixed, divided=(nn.Sequential,))
        elif not fixed.isdisjoint(child.modules()) or (
            divisible and (size > largest or _holds_blocks(child, smallest, divided))
        ):
            modules += _by_size(child, smallest, largest, fixed, divided)
        elif size >= smallest and not isinstance(child, _PARAMETER_LISTS):
            modules.append(child)
    return modules


def _holds_blocks(module: nn.Module, smallest: int, kinds: tuple[type, ...]) -> bool:
    """Return whether it holds a list of modules that are worth a message each, and more than a matrix."""
    for inside in module.modules():
        members = inside.children() if isinstance(inside, kinds) else ()
        blocks = [m for m in members if any(True for _ in m.children()) and _num_bytes(m) >= smallest]
        if len(blocks) > 1:
            return True
    return False


def _num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _tied_outside(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """The modules outside of all units that have a parameter of one: a head below the smallest size that is
    tied to an embedding, or a small module that is used inside and outside of a unit."""
    owned = {p for unit in units for p in unit.parameters()}
    callable_modules = (m for m in _outside(model, units) if not isinstance(m, _PARAMETER_LISTS))
    return [m for m in callable_modules if m is not model and not owned.isdisjoint(_direct_parameters(m))]


def _outside_parameters(model: nn.Module, units: list[nn.Module]) -> list[nn.Parameter]:
    return [p for module in _outside(model, units) for p in _direct_parameters(module)]


def _direct_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return parameters that are in no child; a stage names those of all of its layers as its own."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _outside(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """The modules that can be reached from the model without going through a unit, itself included."""
    reached, waiting, inside = {model: None}, [model], set(units)
    while waiting:
        children = [c for c in waiting.pop().children() if c not in inside and c not in reached]
        reached |= dict.fromkeys(children)
        waiting += children
    return list(reached)


def _without_empty(units: list[Unit]) -> list[Unit]:
    keep = [index for index, unit in enumerate(units) if unit.parameters or unit.needs]
    place = {old: new for new, old in enumerate(keep)}
    return [units[index]._replace(needs=[place[need] for need in units[index].needs]) for index in keep]
