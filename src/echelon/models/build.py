"""From a config, or the name of a preset, to a module; also without memory, for its sizes.

A preset is only a `ModelConfig`: the published GPT-2, GPT-3 and Llama models, mixtures of experts, three for
a laptop. Change one with `dataclasses.replace(preset("gpt-small"), layers=6)`.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from echelon.errors import UserError, did_you_mean
from echelon.models.config import ExpertsConfig, ModelConfig, RopeScaling
from echelon.models.image.config import ImageConfig, image_preset
from echelon.models.image.model import ImageModel
from echelon.models.transformer import GPT, Llama, Transformer


def _gpt(layers: int, width: int, heads: int, sequence: int) -> ModelConfig:
    return ModelConfig("gpt", layers, width, heads, vocab=50257, sequence=sequence, tied=True)


def _llama2(layers: int, width: int, heads: int, kv_heads: int | None, ffn: int) -> ModelConfig:
    return ModelConfig("llama", layers, width, heads, vocab=32000, sequence=4096, kv_heads=kv_heads, ffn=ffn)


def _llama3(layers: int, width: int, heads: int, ffn: int, stretch: float | None, tied: bool) -> ModelConfig:
    """Llama 3 reads 8192 tokens; its later releases (3.1, 3.2) stretch the positions to 131072."""
    return ModelConfig(
        "llama",
        layers,
        width,
        heads,
        vocab=128256,
        sequence=131072 if stretch else 8192,
        kv_heads=8,
        ffn=ffn,
        tied=tied,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(stretch, 1.0, 4.0, 8192) if stretch else None,
    )


_PRESETS = {
    # Byte models: the vocabulary is the 256 bytes, no tokenizer is needed.
    "gpt-tiny": ModelConfig("gpt", 4, 128, 4, vocab=256, sequence=128, tied=True),
    "llama-tiny": ModelConfig("llama", 4, 128, 4, vocab=256, sequence=128, kv_heads=2, ffn=384),
    "moe-tiny": ModelConfig(
        "llama",
        layers=4,
        width=128,
        heads=4,
        vocab=256,
        sequence=128,
        kv_heads=2,
        experts=ExpertsConfig(8, 2, hidden=192, balance=0.01),
    ),
    "gpt-small": _gpt(12, 768, 12, 1024),
    "gpt-medium": _gpt(24, 1024, 16, 1024),
    "gpt-large": _gpt(36, 1280, 20, 1024),
    "gpt-xl": _gpt(48, 1600, 25, 1024),
    # The GPT-3 paper prints 24 heads for 1.3B and width 5140 for 13B, which are not divisible; these
    # are the sizes that everyone builds instead.
    "gpt-1.3b": _gpt(24, 2048, 16, 2048),
    "gpt-2.7b": _gpt(32, 2560, 32, 2048),
    "gpt-6.7b": _gpt(32, 4096, 32, 2048),
    "gpt-13b": _gpt(40, 5120, 40, 2048),
    "gpt-175b": _gpt(96, 12288, 96, 2048),
    "llama2-7b": _llama2(32, 4096, 32, kv_heads=None, ffn=11008),
    "llama2-13b": _llama2(40, 5120, 40, kv_heads=None, ffn=13824),
    "llama2-70b": _llama2(80, 8192, 64, kv_heads=8, ffn=28672),
    "llama3-1b": _llama3(16, 2048, 32, ffn=8192, stretch=32.0, tied=True),
    "llama3-8b": _llama3(32, 4096, 32, ffn=14336, stretch=None, tied=False),
    "llama3-70b": _llama3(80, 8192, 64, ffn=28672, stretch=None, tied=False),
    "llama3-405b": _llama3(126, 16384, 128, ffn=53248, stretch=8.0, tied=False),
    "mixtral-8x7b": ModelConfig(
        "llama",
        layers=32,
        width=4096,
        heads=32,
        vocab=32000,
        sequence=32768,
        kv_heads=8,
        rope_theta=1e6,
        experts=ExpertsConfig(8, 2, hidden=14336, balance=0.02),
    ),
    "deepseek-moe-16b": ModelConfig(
        "llama",
        layers=28,
        width=2048,
        heads=16,
        vocab=102400,
        sequence=4096,
        ffn=10944,
        norm_epsilon=1e-6,
        experts=ExpertsConfig(
            64, 6, hidden=1408, normalize=False, shared=2 * 1408, first_dense=1, balance=0.001
        ),
    ),
    "qwen3-30b-a3b": ModelConfig(
        "llama",
        layers=48,
        width=2048,
        heads=32,
        vocab=151936,
        sequence=40960,
        kv_heads=4,
        head_width=128,
        qk_norm=True,
        norm_epsilon=1e-6,
        rope_theta=1e6,
        experts=ExpertsConfig(128, 8, hidden=768, balance=0.001),
    ),
}


def presets() -> tuple[str, ...]:
    """List the names that `preset` knows, small families first."""
    return tuple(_PRESETS)


def preset(name: str) -> ModelConfig:
    """Return the config of a named model: preset("llama3-8b")."""
    if name not in _PRESETS:
        raise UserError(f"'{name}' is not a model preset{did_you_mean(name, _PRESETS)}")
    return _PRESETS[name]


_FAMILIES: dict[str, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}


def build(model: ModelConfig | str) -> Transformer:
    """Build a model from its config or its preset's name, with initial values from torch's seed.

    Under `torch.device("meta")` it takes no memory; `to_empty` and `reset_parameters` fill it later.

        build("gpt-tiny")
    """
    config = preset(model) if isinstance(model, str) else model
    return _FAMILIES[config.family](config)


def build_image(model: ImageConfig | str) -> ImageModel:
    """Build an image model from its config or its preset's name, with initial values from torch's seed.

    For example `build_image("resnet-50")`.
    """
    return ImageModel(image_preset(model) if isinstance(model, str) else model)


@final
class _NoInitialValues(TorchFunctionMode):
    """Leaves out `nn.init`: on the meta device its functions do nothing, after a second of imports."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def build_without_memory(config: ModelConfig | ImageConfig) -> nn.Module:
    """Build the model on the meta device, without initial values."""
    with torch.device("meta"), _NoInitialValues():
        return build(config) if isinstance(config, ModelConfig) else build_image(config)


def num_parameters(config: ModelConfig | ImageConfig) -> int:
    """Count the parameters of a model; a tied weight counts once."""
    if isinstance(config, ModelConfig):
        return config.num_parameters
    return sum(parameter.numel() for parameter in build_without_memory(config).parameters())
