"""The layers of a model: what it lists itself, each taking what the one before returned.

Causal language models of transformers list none; those of known families are listed here (huggingface.py).
"""

from torch import nn

from echelon.layering.huggingface import FAMILIES, fault_of, frequencies, known_family, layers_of

__all__ = ["frequencies", "how_to_list", "listed_layers"]


def listed_layers(model: nn.Module) -> list[nn.Module]:
    """The members of an nn.Sequential, or what `layers()` returns; none, if the model lists none.

    Of a transformers model of a known family, wrappers around its own parts, made anew at every call.
    """
    if isinstance(model, nn.Sequential):
        return list(model)
    layers = getattr(model, "layers", None)
    if callable(layers) and not isinstance(layers, nn.Module):
        return list(layers())
    family = known_family(model)
    return layers_of(model, family) if family is not None and not fault_of(model) else []


def how_to_list(model: nn.Module) -> str:
    """What to do about a model that lists no layers."""
    if known_family(model) is not None:
        return fault_of(model)
    return (
        "make it an nn.Sequential, or give it layers() -> list[nn.Module], each layer taking what the one "
        f"before returned; of transformers these are taken as they are: {', '.join(FAMILIES)}"
    )
