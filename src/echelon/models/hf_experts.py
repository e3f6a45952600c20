"""The experts of a config.json <-> `ExpertsConfig`."""

from collections.abc import Mapping
from typing import Any

from echelon.models.config import ModelConfig
from echelon.models.experts_config import TRAINING_FIELDS, ExpertsConfig
from echelon.models.hf_dialects import Dialect

# transformers 4 writes the first of a Qwen3-MoE, transformers 5 the second.
_OTHER_KEYS = {"num_experts": "num_local_experts"}

# Lists of layers, and numbers of experts: what no single key of theirs has as we do.
_DENSE_LAYERS, _NUM_SHARED = "mlp_only_layers", "n_shared_experts"


def read_experts(
    model_type: str, dialect: Dialect, raw: Mapping[str, Any], errors: list[str]
) -> dict[str, Any]:
    """The values of an ExpertsConfig."""
    values = {
        name: raw.get(key, raw.get(_OTHER_KEYS.get(key, key), default))
        for name, (key, default) in dialect.experts.items()
    }
    if model_type == "qwen3_moe":
        layers = raw.get(_DENSE_LAYERS) or []
        if layers != list(range(len(layers))):
            errors.append(
                f"{_DENSE_LAYERS}={layers!r}: is not supported; must be the first layers, like [0, 1]"
            )
        values["first_dense"] = len(layers)
    if model_type == "deepseek":
        shared, hidden = raw.get(_NUM_SHARED) or 0, values["hidden"]
        if type(shared) is int and type(hidden) is int:
            values["shared"] = shared * hidden
        else:
            errors.append(f"{_NUM_SHARED}={shared!r}: must be an integer, or null")
    return values


def write_experts(model_type: str, dialect: Dialect, config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json."""
    experts = config.experts
    if experts is None:
        return {}
    raw = {key: getattr(experts, name) for name, (key, _) in dialect.experts.items()}
    if model_type == "qwen3_moe":
        raw[_DENSE_LAYERS] = list(range(experts.first_dense))
    if model_type == "deepseek":
        raw[_NUM_SHARED] = experts.shared // experts.hidden or None
    return raw


def computed_with(experts: ExpertsConfig | None) -> dict[str, object]:
    """What a model computes with: all but what it is only trained with."""
    return {
        name: value
        for name, value in (vars(experts) if experts else {}).items()
        if name not in TRAINING_FIELDS
    }
