"""An image model: a list of layers from images to one number for each class; and its folder of weights."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models.blocks import reset_parameters
from echelon.models.image.config import ImageConfig, config_from_json, config_to_json, read_image_config
from echelon.models.image.networks import NETWORKS
from echelon.state.weight_files.layout import plain_layout, whole
from echelon.state.weight_files.weight_folder import WeightFolder


@final
class ImageModel(nn.Module):
    """A network of images: `ImageModel(image_preset("alexnet"))`."""

    def __init__(self, config: ImageConfig) -> None:
        super().__init__()
        self.config = config
        self.chain = nn.ModuleList(NETWORKS[config.family](config))

    def layers(self) -> list[nn.Module]:
        """List the layers: each convolution, Inception module or residual block is one."""
        return list(self.chain)

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, 3, image_size, image_size] to logits [batch, classes]."""
        x = images
        for layer in self.layers():
            x = layer(x)
        return x

    def config_json(self, dtype: torch.dtype) -> dict[str, Any]:
        """Write the config.json of files with weights of this type; it has the names of the classes."""
        return config_to_json(self.config, str(dtype).removeprefix("torch."))

    def config_errors(self, raw: Mapping[str, Any]) -> list[str]:
        """List why weights with this config.json are not those of this model."""
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
        """Draw initial values for the whole model, for example after `to_empty`; same seed, same values."""
        reset_parameters(self)


def load_image(folder: str | Path) -> ImageModel:
    """Build the image model in a folder, with its weights in the type they are stored in, on the CPU."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"image model '{folder}': there is no such folder")
    with torch.device("meta"):  # no memory and no random values for weights that are loaded
        model = ImageModel(read_image_config(folder))
    load_weights(model, WeightFolder(folder, partial(plain_layout, model)))
    return model


def load_weights(model: nn.Module, weights: WeightFolder) -> None:
    """Fill a model without memory with the weights of a folder, which must be those of the model."""
    weights.check()
    state = model.state_dict()
    for name in weights.names():
        (state[name],) = weights.read(name, [whole(state[name].shape)])
    model.load_state_dict(state, assign=True)
