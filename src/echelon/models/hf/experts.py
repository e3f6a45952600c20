"""The experts of a config.json <-> `ExpertsConfig`."""

from collections.abc import Mapping
from typing import Any

from echelon.models.config import ModelConfig
from echelon.models.experts_config import TRAINING_FIELDS, ExpertsConfig
from echelon.models.hf.dialects import Dialect

# transformers 4 writes the first of a Qwen3-MoE, transformers 5 the second.
_OTHER_KEYS = {"num_experts": "num_local_experts"}

# Lists of layers, and numbers of experts: what no single key of theirs has as we do.
_DENSE_LAYERS, _NUM_SHARED = "mlp_only_layers", "n_shared_experts"
# Whether transformers adds a loss of the gates; whether DeepSeek's is the mean of those of single samples.
_IS_BALANCED, _PER_SAMPLE = "output_router_logits", "seq_aux"


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
    values["balance"] = _read_balance(model_type, raw, values)
    return values


def write_experts(model_type: str, dialect: Dialect, config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json."""
    experts = config.experts
    if experts is None:
        return {}
    raw = {key: getattr(experts, name) for name, (key, _) in dialect.experts.items()}
    if model_type == "deepseek":
        raw[_PER_SAMPLE] = False
    else:
        sparse = config.layers - experts.first_dense
        raw[dialect.experts["balance"][0]] = experts.balance * sparse / experts.top_k
        raw[_IS_BALANCED] = experts.balance > 0
    if model_type == "qwen3_moe":
        raw[_DENSE_LAYERS] = list(range(experts.first_dense))
    if model_type == "deepseek":
        raw[_NUM_SHARED] = experts.shared // experts.hidden or None
    return raw


def _read_balance(model_type: str, raw: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """The weight of our loss of each layer.

    transformers adds one loss, and only if told to: of fractions that sum to top_k, and of means over layers.
    Ours is as large if all layers are alike. DeepSeek's is ours, unless it is taken of each sample.
    """
    balance, top_k = values["balance"], values["top_k"]
    if model_type == "deepseek":
        return 0.0 if raw.get(_PER_SAMPLE, True) else balance
    if not raw.get(_IS_BALANCED, False):
        return 0.0
    layers, dense = raw.get("num_hidden_layers"), values.get("first_dense", 0)
    is_valid = type(balance) in (int, float) and type(top_k) is int and type(layers) is int
    if not is_valid or layers <= dense:
        return balance  # what is wrong is told where it is checked
    return float(f"{balance * top_k / (layers - dense):.15g}")  # as it was before it was written


def computed_with(experts: ExpertsConfig | None) -> dict[str, object]:
    """What a model computes with: all but what it is only trained with."""
    return {
        name: value
        for name, value in (vars(experts) if experts else {}).items()
        if name not in TRAINING_FIELDS
    }
