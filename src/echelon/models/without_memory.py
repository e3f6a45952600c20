"""Models of the meta device, quickly: for their sizes, and for what can be divided."""

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from echelon.models.config import ModelConfig
from echelon.models.families import build
from echelon.models.image.config import ImageConfig
from echelon.models.image.model import build_image


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
    """The model on the meta device, without initial values."""
    with torch.device("meta"), _NoInitialValues():
        return build(config) if isinstance(config, ModelConfig) else build_image(config)


def num_parameters(config: ModelConfig | ImageConfig) -> int:
    """Exact count of the parameters of a model."""
    if isinstance(config, ModelConfig):
        return config.num_parameters
    return sum(parameter.numel() for parameter in build_without_memory(config).parameters())
