"""The shape of an image model as plain data: `ImageConfig`.

It needs no torch. Named sizes are in `image_presets`, the networks in `image_chains` and `image_branches`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from echelon.errors import did_you_mean, raise_errors

ImageFamily = Literal["alexnet", "nin", "overfeat", "vgg16", "inception", "resnet50"]
Stem = Literal["published", "small"]


@dataclass(frozen=True)
class ImageConfig:
    """Sizes and choices of one image model. An image is [3, image_size, image_size].

    divisor      of the published numbers of channels: 8 makes a network an eighth as wide
    stem         "small" begins with small windows and stride 1, for images of about 32 × 32
    class_names  what the outputs mean, in their order; saved with the weights

    ImageConfig("vgg16", classes=10, image_size=32, divisor=8)
    """

    family: ImageFamily
    classes: int = 1000
    image_size: int = 224
    divisor: int = 1
    stem: Stem = "published"
    dropout: float = 0.0
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        errors = []
        for name, value, known in (
            ("family", self.family, get_args(ImageFamily)),
            ("stem", self.stem, get_args(Stem)),
        ):
            if value not in known:
                errors.append(f"{name}={value!r}: is not known{did_you_mean(str(value), known)}")
        errors += [
            f"{name}={value!r}: must be an integer, at least 1"
            for name in ("classes", "image_size", "divisor")
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int) or value < 1
        ]
        is_number = isinstance(self.dropout, int | float) and not isinstance(self.dropout, bool)
        if not is_number or not 0 <= self.dropout < 1:
            errors.append(f"dropout={self.dropout!r}: must be a number from 0 to below 1")
        raise_errors("image model config", errors or self._name_errors())

    def channels(self, published: int) -> int:
        """A number of channels of the published network, divided; at least 1."""
        return max(1, published // self.divisor)

    def _name_errors(self) -> list[str]:
        names = self.class_names
        if names and len(names) != self.classes:
            return [f"classes={self.classes} class_names: has {len(names)} names; give one for each class"]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            return [f"class_names: {', '.join(twice)} is there twice; give each class its own name"]
        return []
