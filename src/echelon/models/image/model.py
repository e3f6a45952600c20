"""An image model: a list of layers from images to one number for each class."""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models.image.blocks import reset_parameters
from echelon.models.image.branches import inception, resnet50
from echelon.models.image.chains import alexnet, nin, overfeat, vgg16
from echelon.models.image.config import ImageConfig
from echelon.models.image.folder_config import config_from_json, config_to_json
from echelon.models.image.presets import image_preset

_FAMILIES: dict[str, Callable[[ImageConfig], list[nn.Sequential]]] = {
    "alexnet": alexnet,
    "nin": nin,
    "overfeat": overfeat,
    "vgg16": vgg16,
    "inception": inception,
    "resnet50": resnet50,
}


@final
class ImageModel(nn.Module):
    """ImageModel(image_preset("alexnet"))"""

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        self.config = config
        self.chain = nn.ModuleList(_FAMILIES[config.family](config))

    def layers(self) -> list[nn.Module]:
        """Where a pipeline may split: each convolution, Inception module or residual block is one layer."""
        return list(self.chain)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, 3, image_size, image_size] to logits [batch, classes]."""
        x = images
        for layer in self.layers():
            x = layer(x)
        return x

    def config_json(self, dtype: torch.dtype) -> dict[str, Any]:
        """The config.json of files with weights of this type; it has the names of the classes."""
        return config_to_json(self.config, str(dtype).removeprefix("torch."))

    def config_errors(self, raw: Mapping[str, Any]) -> list[str]:
        """Why weights with this config.json are not those of this model."""
        try:
            stored = config_from_json(raw)
        except UserError as refusal:
            return list(refusal.errors or (refusal.title,))
        return [
            f"config.json says {name}={theirs!r}, the model has {ours!r}; build the model from the folder's "
            "config"
            for name in ("family", "classes", "image_size", "divisor", "stem", "class_names")
            if (theirs := getattr(stored, name)) != (ours := getattr(self.config, name))
        ]

    def reset_parameters(self) -> None:
        """Initial values for the whole model, for example after `to_empty`; same seed, same values."""
        reset_parameters(self)


def build_image(model: ImageConfig | str) -> ImageModel:
    """Build an image model from its config or its preset's name, with initial values from torch's seed.

    build_image("resnet-50")
    """
    return ImageModel(image_preset(model) if isinstance(model, str) else model)
