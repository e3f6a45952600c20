"""The layers of a model: those that it lists itself, each taking what the one before returned.

Causal language models of transformers list none; echelon.nn.huggingface lists those of known families.
"""

import inspect
from collections.abc import Callable, Iterable
from inspect import Parameter
from typing import Any

from torch import nn

from echelon.errors import UserError
from echelon.nn.huggingface.adapters import adapted_model, reason_not_passed_on
from echelon.nn.huggingface.families import (
    ENCODERS,
    FAMILIES,
    find_encoder,
    find_family,
    layers_of,
    reason_not_listed,
)
from echelon.nn.huggingface.layers import modules_outside
from echelon.nn.huggingface.modules import is_encoder_decoder
from echelon.nn.wrapping import replaced_forward


def listed_layers(model: nn.Module) -> list[nn.Module]:
    """Return the members of an nn.Sequential, or the result of `layers()`; empty if the model lists none.

    A subclass that overrides only `forward` lists none: its forward may do more than run the layers. A
    transformers model of a known family lists wrappers around its own modules, new ones at every call. Of
    a model of peft, the layers are those of the model inside.
    """
    if reason_not_passed_on(model):
        return []
    model = adapted_model(model)
    listing = _listing(model)
    if listing is not None:
        return [] if _reason_own_forward(model) else _check_modules(model, list(listing()))
    if isinstance(model, nn.Sequential):
        return [] if _reason_own_forward(model) else list(model)
    family = find_family(model) or find_encoder(model)
    return layers_of(model, family) if family is not None and not reason_not_listed(model) else []


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
    if find_family(model) is not None or find_encoder(model) is not None:
        return reason_not_listed(model)
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
        "make it an nn.Sequential, or give it layers() -> list[nn.Module], each layer taking what the one "
        "before returned; these models of transformers work as they are: "
        f"{', '.join([*FAMILIES, *ENCODERS])}"
    )


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
