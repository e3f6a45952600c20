"""Named image models: six published networks, and each of them small, for images of 32 × 32.

A preset is only an `ImageConfig`; change one with `dataclasses.replace(image_preset("vgg16"), classes=10)`.
"""

from echelon.errors import UserError, did_you_mean
from echelon.models.image.config import ImageConfig


def _tiny(config: ImageConfig) -> ImageConfig:
    return ImageConfig(config.family, classes=8, image_size=32, divisor=16, stem="small")


_PUBLISHED = {
    "alexnet": ImageConfig("alexnet", dropout=0.5),
    "nin": ImageConfig("nin", dropout=0.5),
    "overfeat": ImageConfig("overfeat", image_size=231, dropout=0.5),
    "vgg16": ImageConfig("vgg16", dropout=0.5),
    "inception-v1": ImageConfig("inception", dropout=0.4),
    "resnet-50": ImageConfig("resnet50"),
}
_PRESETS = {**_PUBLISHED, **{f"{name}-tiny": _tiny(config) for name, config in _PUBLISHED.items()}}


def image_presets() -> tuple[str, ...]:
    """The names that `image_preset` knows."""
    return tuple(_PRESETS)


def image_preset(name: str) -> ImageConfig:
    """The config of a named image model: image_preset("resnet-50")."""
    if name not in _PRESETS:
        raise UserError(f"'{name}' is not an image preset{did_you_mean(name, _PRESETS)}")
    return _PRESETS[name]
