"""Models to train: GPT, Llama and image networks, as plain torch modules that list their layers.

They know nothing of parallelism. `train` and the benchmarks use them; the strategies take any model that
lists its layers.
"""

from echelon.models.config import ModelConfig, RopeScaling
from echelon.models.experts_config import ExpertsConfig
from echelon.models.families import build
from echelon.models.generate import generate
from echelon.models.gpt import GPT
from echelon.models.huggingface import (
    from_hf_state,
    load_hf,
    read_hf_config,
    save_hf,
    save_hf_state,
    to_hf_state,
)
from echelon.models.image.config import ImageConfig
from echelon.models.image.folder import load_image
from echelon.models.image.folder_config import read_image_config
from echelon.models.image.model import ImageModel, build_image
from echelon.models.image.presets import image_preset, image_presets
from echelon.models.llama import Llama
from echelon.models.loss import cross_entropy
from echelon.models.presets import preset, presets
from echelon.models.transformer import Transformer
from echelon.models.without_memory import build_without_memory, num_parameters

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
