"""The config.json of a folder with the weights of an image model: its sizes, and the names of its classes.

The keys are those of Hugging Face where it has one (`image_size`, `id2label`, `torch_dtype`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.errors import UserError
from echelon.models.image.config import ImageConfig
from echelon.state.weight_files import CONFIG, read_json

MODEL_TYPE = "echelon-image"
_FIELDS = ("family", "classes", "image_size", "divisor", "stem", "dropout")


def config_to_json(config: ImageConfig, dtype: str) -> dict[str, Any]:
    """The config.json of weights of this type."""
    return {
        "architectures": ["ImageModel"],
        "model_type": MODEL_TYPE,
        **{name: getattr(config, name) for name in _FIELDS},
        "id2label": {str(number): name for number, name in enumerate(config.class_names)},
        "dtype": dtype,
    }


def config_from_json(raw: Mapping[str, Any]) -> ImageConfig:
    """The config in a config.json."""
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
    """The sizes and classes of the image model in a folder, without its weights."""
    return config_from_json(read_json(Path(folder) / CONFIG))
