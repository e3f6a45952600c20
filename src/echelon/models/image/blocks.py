"""The parts of image models: convolutions that know their initial values, and lists of layers.

A layer is a convolution with what follows it up to the next one: its ReLU, its pooling.
"""

from typing import final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models.image.config import ImageConfig

HEAD_STD = 0.01


class Conv(nn.Conv2d):
    """nn.Conv2d with He's initial values: the variance of what passes through ReLUs stays."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class HiddenLinear(nn.Linear):
    """nn.Linear before a ReLU, with He's initial values."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        nn.init.zeros_(self.bias)


class ClassLinear(nn.Linear):
    """The last layer of a classifier: small weights, so that at first all classes are about as likely."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=HEAD_STD)
        nn.init.zeros_(self.bias)


class ImageInput(nn.Module):
    """Refuses what is no batch of images of the model's size. It comes first in the first layer."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.image_size = image_size

    def forward(self, images: Tensor) -> Tensor:
        size = self.image_size
        if images.shape[1:] != (3, size, size) or not images.is_floating_point():
            raise UserError(
                f"this model takes images [batch, 3, {size}, {size}] of floating point numbers, got "
                f"{list(images.shape)} of {images.dtype}; resize them, or set image_size of the model"
            )
        return images


class MeanOverPlaces(nn.Module):
    """[batch, channels, height, width] to [batch, channels]: a global average pooling."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


@final
class LayerList:
    """Collects layers, and follows the shape of one image through them.

    layers = LayerList(config)
    layers.conv(64, kernel=3, padding=1)
    layers.max_pool(2, stride=2)            # a part of the layer before
    """

    def __init__(self, config: ImageConfig) -> None:
        self.config = config
        self.channels, self.size = 3, config.image_size
        self.layers: list[nn.Sequential] = []
        self._before: list[nn.Module] = [ImageInput(config.image_size)]

    def add(self, *parts: nn.Module) -> None:
        """A new layer."""
        self.layers.append(nn.Sequential(*self._before, *parts))
        self._before = []

    def conv(self, channels: int, kernel: int, *, stride: int = 1, padding: int = 0) -> None:
        """A layer of a convolution and a ReLU."""
        self.add(Conv(self.channels, channels, kernel, stride, padding), nn.ReLU())
        self.channels = channels
        self._shrink("convolution", kernel, stride, padding)

    def max_pool(self, kernel: int, *, stride: int, padding: int = 0, ceil: bool = False) -> None:
        """Ends the last layer with a pooling. `ceil`: a window that begins inside counts."""
        self.layers[-1].append(nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil))
        self._shrink("pooling", kernel, stride, padding, ceil)

    def dropout(self) -> None:
        """Ends the last layer with a dropout, if the config has one."""
        if self.config.dropout:
            self.layers[-1].append(nn.Dropout(self.config.dropout))

    def flatten(self) -> int:
        """Ends the last layer with vectors; returns their length."""
        self.layers[-1].append(nn.Flatten())
        return self.channels * self.size**2

    def classifier(self, *hidden: int) -> None:
        """Fully connected layers: hidden ones with ReLU and dropout, then one output for each class."""
        inputs = self.flatten()
        for width in hidden:
            self.add(HiddenLinear(inputs, width), nn.ReLU())
            self.dropout()
            inputs = width
        self.add(ClassLinear(inputs, self.config.classes))

    def _shrink(self, name: str, kernel: int, stride: int, padding: int, ceil: bool = False) -> None:
        room = self.size + 2 * padding - kernel
        if room < 0 and not ceil:
            raise UserError(
                f"image_size={self.config.image_size} stem={self.config.stem!r}: too small for "
                f"{self.config.family}: a {name} of {kernel} × {kernel} gets {self.size} × {self.size}; use "
                "larger images, or stem='small'"
            )
        steps = -(-room // stride) if ceil else room // stride
        if ceil and (steps * stride) >= self.size + padding:
            steps -= 1  # torch drops a window that would begin in the padding
        self.size = steps + 1


@torch.no_grad()
def reset_parameters(model: nn.Module) -> None:
    """Draw the initial values of every part, in the order in which it was built."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if module is not model and callable(reset):
            reset()
