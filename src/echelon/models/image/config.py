"""The shape of an image model as plain data, `ImageConfig`; named sizes; its config.json.

It needs no torch. The networks are in `networks`. The keys of config.json are those of Hugging Face where it
has one (`image_size`, `id2label`, `dtype`). A preset is only an `ImageConfig`; change one with
`dataclasses.replace(image_preset("vgg16"), classes=10)`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.models.config import value_errors
from echelon.state.weight_files.weight_folder import CONFIG, read_json

ImageFamily = Literal["alexnet", "nin", "overfeat", "vgg16", "inception", "resnet50"]
Stem = Literal["published", "small"]


@dataclass(frozen=True)
class ImageConfig:
    """Sizes and choices of one image model. An image is [3, image_size, image_size].

        ImageConfig("vgg16", classes=10, image_size=32, divisor=8)

    Attributes:
        divisor: of the published numbers of channels: 8 makes a network an eighth as wide.
        stem: "small" begins with small windows and stride 1, for images of about 32 × 32.
        class_names: what the outputs mean, in their order; saved with the weights.
    """

    family: ImageFamily
    classes: int = 1000
    image_size: int = 224
    divisor: int = 1
    stem: Stem = "published"
    dropout: float = 0.0
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        errors = [
            f"{name}={value!r}: is not known{did_you_mean(str(value), known)}"
            for name, known in (("family", get_args(ImageFamily)), ("stem", get_args(Stem)))
            if (value := getattr(self, name)) not in known
        ]
        errors += value_errors(self, "count", "classes", "image_size", "divisor")
        errors += value_errors(self, "fraction", "dropout")
        names = self.class_names
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if not errors and names and len(names) != self.classes:
            errors.append(
                f"classes={self.classes} class_names: has {len(names)} names; give one for each class"
            )
        elif not errors and twice:
            errors.append(f"class_names: {', '.join(twice)} is there twice; give each class its own name")
        raise_errors("image model config", errors)

    def channels(self, published: int) -> int:
        """Divide a number of channels of the published network; at least 1 is left."""
        return max(1, published // self.divisor)


_PUBLISHED = {
    "alexnet": ImageConfig("alexnet", dropout=0.5),
    "nin": ImageConfig("nin", dropout=0.5),
    "overfeat": ImageConfig("overfeat", image_size=231, dropout=0.5),
    "vgg16": ImageConfig("vgg16", dropout=0.5),
    "inception-v1": ImageConfig("inception", dropout=0.4),
    "resnet-50": ImageConfig("resnet50"),
}
_PRESETS = _PUBLISHED | {
    f"{name}-tiny": ImageConfig(config.family, classes=8, image_size=32, divisor=16, stem="small")
    for name, config in _PUBLISHED.items()
}


def image_presets() -> tuple[str, ...]:
    """List the names that `image_preset` knows."""
    return tuple(_PRESETS)


def image_preset(name: str) -> ImageConfig:
    """Return the config of a named image model: image_preset("resnet-50")."""
    if name not in _PRESETS:
        raise UserError(f"'{name}' is not an image preset{did_you_mean(name, _PRESETS)}")
    return _PRESETS[name]


MODEL_TYPE = "echelon-image"
_FIELDS = ("family", "classes", "image_size", "divisor", "stem", "dropout")


def config_to_json(config: ImageConfig, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["ImageModel"],
        "model_type": MODEL_TYPE,
        **{name: getattr(config, name) for name in _FIELDS},
        "id2label": {str(number): name for number, name in enumerate(config.class_names)},
        "dtype": dtype,
    }


def config_from_json(raw: Mapping[str, Any]) -> ImageConfig:
    if raw.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"{CONFIG} has model_type={raw.get('model_type')!r}: must be '{MODEL_TYPE}', as a training of an "
            "image model writes it"
        )
    missing = [name for name in _FIELDS if name not in raw]
    labels = raw.get("id2label", {})
    numbers = [str(number) for number in range(len(labels))] if isinstance(labels, dict) else None
    if missing or numbers is None or any(number not in labels for number in numbers):
        reason = f"{', '.join(missing)} is missing" if missing else "id2label must name classes 0, 1, 2, …"
        raise UserError(f"{CONFIG}: {reason}; take the file that was written with the weights")
    names = tuple(str(labels[number]) for number in numbers)
    return ImageConfig(**{name: raw[name] for name in _FIELDS}, class_names=names)


def read_image_config(folder: str | Path) -> ImageConfig:
    """Read the sizes and classes of the image model in a folder, without its weights."""
    return config_from_json(read_json(Path(folder) / CONFIG))
