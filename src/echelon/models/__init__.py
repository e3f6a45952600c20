"""Models to train: GPT, Llama and image networks, as plain torch modules that list their layers.

They know nothing of parallelism. `train` and the benchmarks use them; the strategies take any model that
lists its layers.
"""

from echelon.models.build import build, build_image, build_without_memory, num_parameters, preset, presets
from echelon.models.config import ExpertsConfig, ModelConfig, RopeScaling
from echelon.models.hf.folder import (
    from_hf_state,
    load_hf,
    read_hf_config,
    save_hf,
    save_hf_state,
    to_hf_state,
)
from echelon.models.image.config import ImageConfig, image_preset, image_presets, read_image_config
from echelon.models.image.model import ImageModel, load_image
from echelon.models.transformer import GPT, Llama, Transformer, cross_entropy, generate

__all__ = [
    "GPT",
    "ExpertsConfig",
    "ImageConfig",
    "ImageModel",
    "Llama",
    "ModelConfig",
    "RopeScaling",
    "Transformer",
    "build",
    "build_image",
    "build_without_memory",
    "cross_entropy",
    "from_hf_state",
    "generate",
    "image_preset",
    "image_presets",
    "load_hf",
    "load_image",
    "num_parameters",
    "preset",
    "presets",
    "read_hf_config",
    "read_image_config",
    "save_hf",
    "save_hf_state",
    "to_hf_state",
]
