"""An image model: a list of layers from images to one number for each class."""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models.image.blocks import LayerList, MeanOverPlaces, reset_parameters
from echelon.models.image.branches import inception, resnet50
from echelon.models.image.config import ImageConfig
from echelon.models.image.folder_config import config_from_json, config_to_json
from echelon.models.image.presets import image_preset

# The networks that are a plain chain of convolutions: AlexNet, NiN, Overfeat, VGG16.

VGG16 = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", *2 * (512, 512, 512, "pool"))


def alexnet(config: ImageConfig) -> list[nn.Sequential]:
    """Krizhevsky, 2014 (arXiv 1404.5997): AlexNet for one device, in one column."""
    net, wide = LayerList(config), config.channels
    if config.stem == "published":
        net.conv(wide(64), 11, stride=4, padding=2)
    else:
        net.conv(wide(64), 5, padding=2)
    net.max_pool(3, stride=2)
    net.conv(wide(192), 5, padding=2)
    net.max_pool(3, stride=2)
    for channels in (384, 256, 256):
        net.conv(wide(channels), 3, padding=1)
    net.max_pool(3, stride=2)
    net.classifier(wide(4096), wide(4096))
    return net.layers


def nin(config: ImageConfig) -> list[nn.Sequential]:
    """Lin et al., 2013 (arXiv 1312.4400): small perceptrons over channels; no fully connected layer.

    Sizes for ImageNet are those of the authors' model in the Caffe model zoo.
    """
    net, wide = LayerList(config), config.channels
    if config.stem == "published":
        net.conv(wide(96), 11, stride=4)
    else:
        net.conv(wide(96), 5, padding=2)
    _perceptron(net, wide(96), wide(96))
    net.max_pool(3, stride=2)
    for channels, kernel in ((256, 5), (384, 3)):
        net.conv(wide(channels), kernel, padding=kernel // 2)
        _perceptron(net, wide(channels), wide(channels))
        net.max_pool(3, stride=2)
    net.dropout()
    net.conv(wide(1024), 3, padding=1)
    _perceptron(net, wide(1024), config.classes)
    net.layers[-1].append(MeanOverPlaces())
    return net.layers


def _perceptron(net: LayerList, *channels: int) -> None:
    for width in channels:
        net.conv(width, 1)


def overfeat(config: ImageConfig) -> list[nn.Sequential]:
    """Sermanet et al., 2013 (arXiv 1312.6229): the fast model of table 1."""
    net, wide = LayerList(config), config.channels
    if config.stem == "published":
        net.conv(wide(96), 11, stride=4)
    else:
        net.conv(wide(96), 5, padding=2)
    net.max_pool(2, stride=2)
    net.conv(wide(256), 5)
    net.max_pool(2, stride=2)
    for channels in (512, 1024, 1024):
        net.conv(wide(channels), 3, padding=1)
    net.max_pool(2, stride=2)
    net.classifier(wide(3072), wide(4096))
    return net.layers


def vgg16(config: ImageConfig) -> list[nn.Sequential]:
    """Simonyan and Zisserman, 2014 (arXiv 1409.1556): configuration D. Its stem is small as published."""
    net = LayerList(config)
    for part in VGG16:
        if isinstance(part, int):
            net.conv(config.channels(part), 3, padding=1)
        else:
            net.max_pool(2, stride=2)
    net.classifier(config.channels(4096), config.channels(4096))
    return net.layers


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
