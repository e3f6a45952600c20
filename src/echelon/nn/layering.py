"""The layers of a model, of two kinds.

listed_layers    each takes what the one before returned, and together they are the model's forward: a list
                 of the model itself, or of a known family of transformers (echelon.nn.huggingface)
called_layers    the model's own forward calls them in order, with code of its own around them: a list that
                 the user has named (`layers="transformer.h"`), or that of the one model inside a wrapper
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from inspect import Parameter
from typing import Any, NamedTuple

from torch import nn

from echelon.errors import UserError, raise_errors
from echelon.nn.huggingface import families
from echelon.nn.huggingface.adapters import adapted_model, reason_not_passed_on
from echelon.nn.huggingface.layers import modules_outside
from echelon.nn.huggingface.modules import is_encoder_decoder
from echelon.nn.wrapping import replaced_forward


def listed_layers(model: nn.Module) -> list[nn.Module]:
    """Return the members of an nn.Sequential, or the result of `layers()`; empty if the model lists none.

    A subclass that overrides only `forward` lists none: its forward may do more than run the layers. A
    transformers model of a known family lists wrappers around its own modules, new ones at every call. Of
    a model of peft, the layers are those of the model inside. A model whose layers the user has named lists
    none: its own forward runs.
    """
    if _PATHS in vars(model) or reason_not_passed_on(model):
        return []
    model = adapted_model(model)
    listing = _listing(model)
    if listing is not None:
        return [] if _reason_own_forward(model) else _check_modules(model, list(listing()))
    if isinstance(model, nn.Sequential):
        return [] if _reason_own_forward(model) else list(model)
    family = families.find_known(model)
    is_listed = family is not None and not families.reason_not_listed(model)
    return families.layers_of(model, family) if family is not None and is_listed else []


def _check_modules(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    wrong = next((layer for layer in layers if not isinstance(layer, nn.Module)), None)
    if wrong is not None:
        raise UserError(
            f"layers() of {type(model).__name__} returns a {type(wrong).__name__}: must be the modules that "
            "its forward runs one after the other; rename it if it lists something else"
        )
    return layers


def how_to_list(model: nn.Module) -> str:
    """Say how to change a model that lists no layers, so that it does."""
    reason = reason_not_passed_on(model)
    if reason:
        return reason
    model = adapted_model(model)
    if families.find_known(model) is not None:
        return families.reason_not_listed(model)
    if _listing(model) is not None or isinstance(model, nn.Sequential):
        return _reason_own_forward(model)
    layers: Any = getattr(model, "layers", None)
    if callable(layers) and not isinstance(layers, nn.Module):
        return (
            f"its layers() needs {', '.join(_required_arguments(layers))}, and is called without arguments; "
            "give them defaults, or rename it if it lists something else"
        )
    if is_encoder_decoder(model):
        return (
            "it is an encoder and a decoder, and every layer of the decoder takes what the encoder returned, "
            "which no chain of layers passes on; use data, zero and tensor"
        )
    return (
        f"{_hint(model)}make it an nn.Sequential, or give it layers() -> list[nn.Module], each layer taking "
        "what the one before returned; these models of transformers work as they are: "
        f"{', '.join([*families.FAMILIES, *families.ENCODERS])}"
    )


# Layers that the model's own forward calls.

_PATHS = "_echelon_layers"  # the attribute of a model that has the names of the user's lists
_LISTS = (nn.ModuleList, nn.Sequential)


class LayerList(NamedTuple):
    """Layers in the order in which a forward calls them, and the names of the lists that have them."""

    paths: tuple[str, ...]
    layers: list[nn.Module]

    def describe(self) -> str:
        """'transformer.h (12 × Block)'."""
        kinds = [type(layer).__name__ for layer in self.layers]
        counts = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
        return f"{', '.join(self.paths)} ({counts})"


def name_layers(model: nn.Module, paths: str | Sequence[str] | None) -> None:
    """Remember which lists of `model` have its layers; None forgets those of an earlier call."""
    vars(model).pop(_PATHS, None)
    if paths is None:
        return
    named = (paths,) if isinstance(paths, str) else tuple(paths)
    errors = [error for path in named for error in _path_errors(model, path)]
    if not errors:
        layers = _children(model, named)
        errors += [f"layers={paths!r}: names a layer twice; name each list once"] * (
            len(set(layers)) < len(layers)
        )
        inside = {module for layer in layers for module in layer.modules() if module is not layer}
        errors += [f"layers={paths!r}: one list is inside of a layer of another; name the outer one"] * (
            not inside.isdisjoint(layers)
        )
    raise_errors(f"the layers of {type(model).__name__}", errors)
    vars(model)[_PATHS] = named


def called_layers(model: nn.Module) -> LayerList | None:
    """Return the layers that the model's own forward calls, if the user has named them, or if just one module
    in it lists some, or if it is of a known family; None if not."""
    paths = vars(model).get(_PATHS)
    if paths is not None:
        return LayerList(paths, _children(model, paths))
    found: dict[nn.Module, LayerList] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        listed = _listed_inside(name, module) if module is not model else _blocks_of_family(model)
        if listed is not None:
            found[module] = listed
            inside |= set(module.modules())
    return next(iter(found.values())) if len(found) == 1 else None


def around_layers(model: nn.Module, layers: Iterable[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules in which layers are, and what is beside layers in these: an embedding, a head."""
    in_layers = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in in_layers]
    holders = {module: None for module in outside if not in_layers.isdisjoint(module.modules())}
    children = dict.fromkeys(child for holder in holders for child in holder.children())
    return list(holders), [child for child in children if child not in in_layers and child not in holders]


def stage_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers between which a pipeline cuts: those that the model lists, or else that its forward
    calls. A known family, or a model of peft, that lists none has a reason, and stays refused with it."""
    has_reason = _blocks_of_family(model) is not None or bool(reason_not_passed_on(model))
    called = None if has_reason and _PATHS not in vars(model) else called_layers(model)
    return listed_layers(model) or ([] if called is None else called.layers)


def _listed_inside(name: str, module: nn.Module) -> LayerList | None:
    """Return the layers of a module that lists them when it is a model of its own, and no nn.Sequential."""
    blocks = _blocks_of_family(module)
    if blocks is not None:
        return LayerList(tuple(f"{name}.{path}" for path in blocks.paths), blocks.layers)
    listing = _listing(module)
    if listing is None or isinstance(module, nn.Sequential) or _reason_own_forward(module):
        return None
    layers, own = list(listing()), set(module.modules())
    is_own = all(isinstance(layer, nn.Module) and layer in own for layer in layers)
    return LayerList((f"{name}.layers()",), layers) if layers and is_own else None


def _blocks_of_family(model: nn.Module) -> LayerList | None:
    family = families.find_known(model)
    if family is None:
        return None
    path, blocks = families.block_list(model, family)
    return LayerList((path,), blocks)


def _children(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    return [child for path in paths for child in model.get_submodule(path).children()]


def _path_errors(model: nn.Module, path: str) -> list[str]:
    """List why a path names no layers."""
    modules, lists = dict(model.named_modules()), _lists(model)
    known = f"the lists of {type(model).__name__} are {', '.join(lists) or 'none'}"
    if path not in modules:
        near = get_close_matches(path, lists or modules, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        return [f"layers={path!r}: {type(model).__name__} has no module of this name; {meant}{known}"]
    module = modules[path]
    if not isinstance(module, _LISTS):
        return [
            f"layers={path!r}: is a {type(module).__name__}, and must be an nn.ModuleList or nn.Sequential, "
            f"whose children are the layers; {known}"
        ]
    if not any(True for _ in module.parameters()):
        return [f"layers={path!r}: none of its {len(module)} children has parameters; {known}"]
    return []


def _lists(model: nn.Module) -> list[str]:
    """Name the lists whose children have parameters, the longest first."""
    found = {
        name: module
        for name, module in model.named_modules()
        if name and isinstance(module, _LISTS) and any(True for _ in module.parameters())
    }
    return sorted(found, key=lambda name: -len(found[name]))


def _hint(model: nn.Module) -> str:
    lists = _lists(model)
    return f'give parallelize layers="{lists[0]}", if its forward calls those in order, or ' if lists else ""


def outside_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules, by name, that are never called when a model runs layer by layer."""
    layers = listed_layers(model)
    called = {module for layer in layers for module in [*layer.modules(), *modules_outside(layer)]}
    return {name: module for name, module in model.named_modules() if module not in called}


def _listing(model: nn.Module) -> Callable[[], Iterable[nn.Module]] | None:
    layers: Any = getattr(model, "layers", None)
    is_listing = callable(layers) and not isinstance(layers, nn.Module) and not _required_arguments(layers)
    return layers if is_listing else None


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """List the arguments that a function cannot be called without."""
    parameters = inspect.signature(function).parameters.values()
    optional = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is Parameter.empty and p.kind not in optional]


def _reason_own_forward(model: nn.Module) -> str:
    """Say why a model's forward may do more than run its layers, and the fix; empty if it does not."""
    kind = type(model)
    if replaced_forward(model) is not None:
        return "its forward was replaced, and no stage would run the new one; put what it does into a layer"
    listing = next((cls for cls in kind.__mro__ if "layers" in vars(cls) or cls is nn.Sequential), kind)
    forward = next(cls for cls in kind.__mro__ if "forward" in vars(cls))
    bases = kind.__mro__[kind.__mro__.index(listing) :]
    is_overridden = any("forward" in vars(cls) for cls in bases if cls is not nn.Module)
    if kind.__mro__.index(listing) <= kind.__mro__.index(forward) or not is_overridden:
        return ""
    return (
        f"{forward.__name__} has a forward of its own, which no stage would run, and its layers are those of "
        f"{listing.__name__}; put what it does into a layer, or give {forward.__name__} layers() -> "
        "list[nn.Module], each layer taking what the one before returned"
    )
