"""The networks whose layers have branches: Inception v1 (GoogLeNet) and ResNet-50.

Inception has no auxiliary classifiers and does not normalise responses (LRN). ResNet-50 normalises over the
batch (nn.BatchNorm2d), as published; a plan with microbatches > 1 is refused for it.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from echelon.models.image.blocks import ClassLinear, Conv, LayerList, MeanOverPlaces
from echelon.models.image.config import ImageConfig


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
        net.max_pool(3, stride=2, ceil=True)
    else:
        net.conv(wide(64), 3, padding=1)
    net.conv(wide(64), 1)
    net.conv(wide(192), 3, padding=1)
    net.max_pool(3, stride=2, ceil=True)
    for part in INCEPTION:
        if isinstance(part, Mixed):
            sizes = Mixed(*(wide(each) for each in part))
            net.add(Inception(net.channels, sizes))
            net.channels = sizes.one + sizes.three + sizes.five + sizes.pooled
        else:
            net.max_pool(3, stride=2, ceil=True)
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
