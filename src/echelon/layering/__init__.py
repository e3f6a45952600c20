"""The layers of a model: what it lists itself, each taking what the one before returned.

Causal language models of transformers list none; those of known families are listed here (huggingface.py).
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from echelon.layering.hf_layers import Layer
from echelon.layering.huggingface import FAMILIES, error_of, frequencies, known_family, layers_of
from echelon.wrapping import replaced_forward

__all__ = ["frequencies", "how_to_list", "listed_layers", "outside_layers"]


def listed_layers(model: nn.Module) -> list[nn.Module]:
    """The members of an nn.Sequential, or what `layers()` returns; none, if the model lists none.

    A forward that came later than either, in a subclass, may do something else than the layers in a row.
    Of a transformers model of a known family, wrappers around its own parts, made anew at every call.
    """
    listing = _listing(model)
    if listing is not None:
        return [] if _own_forward(model) else list(listing())
    if isinstance(model, nn.Sequential):
        return [] if _own_forward(model) else list(model)
    family = known_family(model)
    return layers_of(model, family) if family is not None and not error_of(model) else []


def how_to_list(model: nn.Module) -> str:
    """What to do about a model that lists no layers."""
    if known_family(model) is not None:
        return error_of(model)
    if _listing(model) is not None or isinstance(model, nn.Sequential):
        return _own_forward(model)
    return (
        "make it an nn.Sequential, or give it layers() -> list[nn.Module], each layer taking what the one "
        f"before returned; of transformers these are taken as they are: {', '.join(FAMILIES)}"
    )


def outside_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that are never called where its layers run in a row, by name."""
    layers = listed_layers(model)
    called = {module for layer in layers for module in layer.modules()}
    for layer in layers:
        if isinstance(layer, Layer) and layer.setting.rotary is not None:
            called |= set(layer.setting.rotary.modules())
    return {name: module for name, module in model.named_modules() if module not in called}


def _listing(model: nn.Module) -> Callable[[], Iterable[nn.Module]] | None:
    layers: Any = getattr(model, "layers", None)
    return layers if callable(layers) and not isinstance(layers, nn.Module) else None


def _own_forward(model: nn.Module) -> str:
    """Why the layers of a model in a row may not be its forward, and what to do; empty, if they are."""
    kind = type(model)
    if replaced_forward(model) is not None:
        return "its forward was replaced, and no stage would run the new one; put what it does into a layer"
    listing = next((cls for cls in kind.__mro__ if "layers" in vars(cls) or cls is nn.Sequential), kind)
    forward = next(cls for cls in kind.__mro__ if "forward" in vars(cls))
    behind = kind.__mro__[kind.__mro__.index(listing) :]
    overridden = any("forward" in vars(cls) for cls in behind if cls is not nn.Module)
    if kind.__mro__.index(listing) <= kind.__mro__.index(forward) or not overridden:
        return ""
    return (
        f"{forward.__name__} has a forward of its own, which no stage would run, and its layers are those of "
        f"{listing.__name__}; put what it does into a layer, or give {forward.__name__} layers() -> "
        "list[nn.Module], each layer taking what the one before returned"
    )
