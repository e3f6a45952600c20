"""The networks that are a plain chain of convolutions: AlexNet, NiN, Overfeat, VGG16.

None of them normalises responses (LRN), which later work found to bring nothing.
"""

from torch import nn

from echelon.models.image.blocks import LayerList, MeanOverPlaces
from echelon.models.image.config import ImageConfig

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
