"""Published image networks as lists of layers: AlexNet, NiN, Overfeat, VGG16, Inception v1 and ResNet-50.

A layer is a convolution with what follows it up to the next one: its ReLU, its pooling. Inception has no
auxiliary classifiers and does not normalise responses (LRN). ResNet-50 normalises over the batch
(nn.BatchNorm2d), as published; a plan with microbatches > 1 is refused for it.
"""

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models.image.config import ImageConfig

HEAD_STD = 0.01


class Conv(nn.Conv2d):
    """nn.Conv2d with He's initial values: the variance of what passes through ReLUs stays."""

    def reset_parameters(self) -> None:
        _reset_before_relu(self)


class HiddenLinear(nn.Linear):
    """nn.Linear before a ReLU, with He's initial values."""

    def reset_parameters(self) -> None:
        _reset_before_relu(self)


def _reset_before_relu(layer: nn.Conv2d | nn.Linear) -> None:
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class ClassLinear(nn.Linear):
    """The last layer of a classifier: small weights, so that at first all classes are about as likely."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=HEAD_STD)
        nn.init.zeros_(self.bias)


class ImageInput(nn.Module):
    """Refuses tensors that are no images of the model's size. It comes first in the first layer."""

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
    layers.max_pool(2)                      # a part of the layer before
    """

    def __init__(self, config: ImageConfig) -> None:
        self.config = config
        self.channels, self.size = 3, config.image_size
        self.layers: list[nn.Sequential] = []
        self._before: list[nn.Module] = [ImageInput(config.image_size)]

    def add(self, *parts: nn.Module) -> None:
        self.layers.append(nn.Sequential(*self._before, *parts))
        self._before = []

    def conv(self, channels: int, kernel: int, *, stride: int = 1, padding: int = 0) -> None:
        self.add(Conv(self.channels, channels, kernel, stride, padding), nn.ReLU())
        self.channels = channels
        self._shrink("convolution", kernel, stride, padding)

    def stem(self, channels: int, *, padding: int = 0) -> None:
        """Add the first layer: 11 × 11 with stride 4 as published, or 5 × 5 for small images."""
        if self.config.stem == "published":
            self.conv(channels, 11, stride=4, padding=padding)
        else:
            self.conv(channels, 5, padding=2)

    def max_pool(self, kernel: int, *, ceil: bool = False) -> None:
        """End the last layer with a pooling of stride 2. `ceil`: a window that begins inside counts."""
        self.layers[-1].append(nn.MaxPool2d(kernel, 2, ceil_mode=ceil))
        self._shrink("pooling", kernel, 2, 0, ceil)

    def dropout(self) -> None:
        if self.config.dropout:
            self.layers[-1].append(nn.Dropout(self.config.dropout))

    def flatten(self) -> int:
        """End the last layer with vectors; return their length."""
        self.layers[-1].append(nn.Flatten())
        return self.channels * self.size**2

    def classifier(self, *hidden: int) -> None:
        """Add fully connected layers: hidden ones with ReLU and dropout, then one output for each class."""
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


VGG16 = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", *2 * (512, 512, 512, "pool"))


def alexnet(config: ImageConfig) -> list[nn.Sequential]:
    """Krizhevsky, 2014 (arXiv 1404.5997): AlexNet for one device, in one column."""
    net, wide = LayerList(config), config.channels
    net.stem(wide(64), padding=2)
    net.max_pool(3)
    net.conv(wide(192), 5, padding=2)
    net.max_pool(3)
    for channels in (384, 256, 256):
        net.conv(wide(channels), 3, padding=1)
    net.max_pool(3)
    net.classifier(wide(4096), wide(4096))
    return net.layers


def nin(config: ImageConfig) -> list[nn.Sequential]:
    """Lin et al., 2013 (arXiv 1312.4400): small perceptrons over channels; no fully connected layer.

    Sizes for ImageNet are those of the authors' model in the Caffe model zoo.
    """
    net, wide = LayerList(config), config.channels
    for channels, kernel in ((96, 0), (256, 5), (384, 3)):
        if kernel:
            net.conv(wide(channels), kernel, padding=kernel // 2)
        else:
            net.stem(wide(channels))
        net.conv(wide(channels), 1)
        net.conv(wide(channels), 1)
        net.max_pool(3)
    net.dropout()
    net.conv(wide(1024), 3, padding=1)
    net.conv(wide(1024), 1)
    net.conv(config.classes, 1)
    net.layers[-1].append(MeanOverPlaces())
    return net.layers


def overfeat(config: ImageConfig) -> list[nn.Sequential]:
    """Sermanet et al., 2013 (arXiv 1312.6229): the fast model of table 1."""
    net, wide = LayerList(config), config.channels
    net.stem(wide(96))
    net.max_pool(2)
    net.conv(wide(256), 5)
    net.max_pool(2)
    for channels in (512, 1024, 1024):
        net.conv(wide(channels), 3, padding=1)
    net.max_pool(2)
    net.classifier(wide(3072), wide(4096))
    return net.layers


def vgg16(config: ImageConfig) -> list[nn.Sequential]:
    """Simonyan and Zisserman, 2014 (arXiv 1409.1556): configuration D. Its stem is small as published."""
    net = LayerList(config)
    for part in VGG16:
        if isinstance(part, int):
            net.conv(config.channels(part), 3, padding=1)
        else:
            net.max_pool(2)
    net.classifier(config.channels(4096), config.channels(4096))
    return net.layers


class Mixed(NamedTuple):
    """Numbers of channels of an Inception module; those of `reduce` come before the window."""

    one: int
    reduce_three: int
    three: int
    reduce_five: int
    five: int
    pooled: int


# Table 1 of the paper; "pool" is a max pooling of 3 × 3 with stride 2.
INCEPTION = (
    Mixed(64, 96, 128, 16, 32, 32),
    Mixed(128, 128, 192, 32, 96, 64),
    "pool",
    Mixed(192, 96, 208, 16, 48, 64),
    Mixed(160, 112, 224, 24, 64, 64),
    Mixed(128, 128, 256, 24, 64, 64),
    Mixed(112, 144, 288, 32, 64, 64),
    Mixed(256, 160, 320, 32, 128, 128),
    "pool",
    Mixed(256, 160, 320, 32, 128, 128),
    Mixed(384, 192, 384, 48, 128, 128),
)

RESNET50 = ((64, 3), (128, 4), (256, 6), (512, 3))  # channels inside a block, and number of blocks
EXPANSION = 4


class Inception(nn.Module):
    """Four views of the same image, side by side: 1 × 1, 3 × 3, 5 × 5, and the neighbourhood's maximum."""

    def __init__(self, inputs: int, sizes: Mixed) -> None:
        super().__init__()
        self.one = nn.Sequential(Conv(inputs, sizes.one, 1), nn.ReLU())
        self.three = _reduced(inputs, sizes.reduce_three, sizes.three, 3)
        self.five = _reduced(inputs, sizes.reduce_five, sizes.five, 5)
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), Conv(inputs, sizes.pooled, 1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], dim=1)


def _reduced(inputs: int, reduced: int, outputs: int, kernel: int) -> nn.Sequential:
    reduction = Conv(inputs, reduced, 1)
    window = Conv(reduced, outputs, kernel, padding=kernel // 2)
    return nn.Sequential(reduction, nn.ReLU(), window, nn.ReLU())


def inception(config: ImageConfig) -> list[nn.Sequential]:
    """Szegedy et al., 2014 (arXiv 1409.4842)."""
    net, wide = LayerList(config), config.channels
    if config.stem == "published":
        net.conv(wide(64), 7, stride=2, padding=3)
        net.max_pool(3, ceil=True)
    else:
        net.conv(wide(64), 3, padding=1)
    net.conv(wide(64), 1)
    net.conv(wide(192), 3, padding=1)
    net.max_pool(3, ceil=True)
    for part in INCEPTION:
        if isinstance(part, Mixed):
            sizes = Mixed(*(wide(each) for each in part))
            net.add(Inception(net.channels, sizes))
            net.channels = sizes.one + sizes.three + sizes.five + sizes.pooled
        else:
            net.max_pool(3, ceil=True)
    net.layers[-1].append(MeanOverPlaces())
    net.dropout()
    net.add(ClassLinear(net.channels, config.classes))
    return net.layers


class Bottleneck(nn.Module):
    """A residual block: 1 × 1 to few channels, 3 × 3 on these, 1 × 1 back; the input is added.

    The stride is that of the 3 × 3 convolution, as in all implementations of today (ResNet v1.5).
    """

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * channels
        self.body = nn.Sequential(
            *_normed(inputs, channels, 1),
            nn.ReLU(),
            *_normed(channels, channels, 3, stride),
            nn.ReLU(),
            *_normed(channels, outputs, 1),
        )
        is_same = stride == 1 and inputs == outputs
        self.shortcut = nn.Sequential(*([] if is_same else _normed(inputs, outputs, 1, stride)))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return result


def _normed(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = Conv(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


def resnet50(config: ImageConfig) -> list[nn.Sequential]:
    """He et al., 2015 (arXiv 1512.03385)."""
    net, wide = LayerList(config), config.channels
    inputs = wide(64)
    if config.stem == "published":
        pool = nn.MaxPool2d(3, 2, padding=1)
        net.add(*_normed(3, inputs, 7, 2), nn.ReLU(), pool)
    else:
        net.add(*_normed(3, inputs, 3), nn.ReLU())
    for part, (channels, count) in enumerate(RESNET50):
        for block in range(count):
            stride = 2 if part > 0 and block == 0 else 1
            net.add(Bottleneck(inputs, wide(channels), stride))
            inputs = EXPANSION * wide(channels)
    net.layers[-1].append(MeanOverPlaces())
    net.dropout()
    net.add(ClassLinear(inputs, config.classes))
    return net.layers


NETWORKS: dict[str, Callable[[ImageConfig], list[nn.Sequential]]] = {
    "alexnet": alexnet,
    "nin": nin,
    "overfeat": overfeat,
    "vgg16": vgg16,
    "inception": inception,
    "resnet50": resnet50,
}
