"""From a config, or the name of a preset, to a module; also without memory, for its sizes."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from echelon.models.config import ModelConfig
from echelon.models.image.config import ImageConfig, image_preset
from echelon.models.image.model import ImageModel
from echelon.models.presets import preset
from echelon.models.transformer import GPT, Llama, Transformer

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

    build_image("resnet-50")
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
    """Count the parameters of a model, exactly."""
    if isinstance(config, ModelConfig):
        return config.num_parameters
    return sum(parameter.numel() for parameter in build_without_memory(config).parameters())
