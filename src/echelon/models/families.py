"""From a config, or the name of a preset, to a module."""

from echelon.models.config import ModelConfig
from echelon.models.gpt import GPT
from echelon.models.llama import Llama
from echelon.models.presets import preset
from echelon.models.transformer import Transformer

_FAMILIES: dict[str, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}


def build(model: ModelConfig | str) -> Transformer:
    """Build a model from its config or its preset's name, with initial values from torch's seed.

    Under `torch.device("meta")` it takes no memory; `to_empty` and `reset_parameters` fill it later.

    build("gpt-tiny")
    """
    config = preset(model) if isinstance(model, str) else model
    return _FAMILIES[config.family](config)
