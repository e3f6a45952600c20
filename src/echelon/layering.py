"""The layers of a model: what it lists itself, each taking what the one before returned."""

from torch import nn


def listed_layers(model: nn.Module) -> list[nn.Module]:
    """The members of an nn.Sequential, or what `layers()` returns; none, if the model lists none."""
    if isinstance(model, nn.Sequential):
        return list(model)
    layers = getattr(model, "layers", None)
    return list(layers()) if callable(layers) and not isinstance(layers, nn.Module) else []
