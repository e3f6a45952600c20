"""config.json of a Hugging Face folder <-> `ModelConfig`, for the model types in `dialects`.

Options that our models do not have (biases in Llama, another activation, quantised weights, …) are refused by
name: loading them anyway would give a model that runs and is wrong.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.models.config import TRAINING_FIELDS, ExpertsConfig, ModelConfig, RopeScaling
from echelon.models.hf.dialects import DIALECTS, OWN_TYPE, Dialect, dialect_of

T = TypeVar("T")


_ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_sequence": "original_max_position_embeddings",
}

# Of GPT-2, by default 0.1. `attn_pdrop` is ignored, because our attention has no dropout inside.
_DROPOUTS = ("embd_pdrop", "resid_pdrop")

_COMPARED = (
    *("family", "layers", "width", "heads", "num_kv_heads", "head_dim", "ffn_width", "vocab", "norm_epsilon"),
    "qk_norm",
)
_COMPARED_ROPE = ("rope_theta", "rope_scaling")


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed config.json; one UserError lists everything that is missing, wrong or not supported."""
    model_type = str(raw.get("model_type"))
    if model_type not in (*DIALECTS, OWN_TYPE):
        near = did_you_mean(model_type, DIALECTS)
        raise UserError(f"config.json: model_type={model_type} is not supported{near}")
    errors: list[str] = []
    read = _read_own(raw, errors) if model_type == OWN_TYPE else _read(model_type, raw, errors)
    config = _checked(ModelConfig, read, errors)
    raise_errors("config.json", errors)
    assert config is not None
    return config


def _read(model_type: str, raw: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    dialect = DIALECTS[model_type]
    errors += [
        f"{key}={raw[key]!r}: is not supported; must be {' or '.join(map(repr, supported))}"
        for key, supported in dialect.demanded.items()
        if raw.get(key, supported[0]) not in supported
    ]
    values = _read_sizes(dialect, raw, errors)
    if dialect.family == "gpt":
        embedding, values["dropout"] = (raw.get(key, 0.1) for key in _DROPOUTS)
        if embedding != values["dropout"]:
            errors.append(
                f"embd_pdrop={embedding!r} resid_pdrop={values['dropout']!r}: one dropout serves both; make "
                "them equal"
            )
    else:
        values |= _read_rope(raw, dialect.rope_theta, errors)
    if dialect.experts:
        experts = read_experts(model_type, dialect, raw, errors)
        values["experts"] = _checked(ExpertsConfig, experts, errors)
        if not experts.get("first_dense"):
            values.pop("ffn", None)  # no layer has it
    return {"family": dialect.family, "qk_norm": dialect.qk_norm, **values}


def _read_own(raw: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    values = {field.name: raw[field.name] for field in dataclasses.fields(ModelConfig) if field.name in raw}
    required = [f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING]
    errors += [f"{name}: is missing" for name in required if name not in raw]
    values |= {name: None for name in required if name not in raw}
    kinds: dict[str, Callable[..., object]] = {"rope_scaling": RopeScaling, "experts": ExpertsConfig}
    for name, kind in kinds.items():
        if isinstance(values.get(name), Mapping):
            values[name] = _checked(kind, values[name], errors)
    return values


def config_differences(config: ModelConfig, raw: Mapping[str, Any]) -> list[str]:
    """List why a parsed config.json is that of another model than `config`, or of none that we have.

    Dropout may differ, and the weights of losses; and so may the length of sequences: learned positions show
    it in their shape. Whether weights are tied is seen in the files.
    """
    try:
        stored = config_from_hf({key: value for key, value in raw.items() if key not in _DROPOUTS})
    except UserError as error:
        return [f"config.json: {each}" for each in error.errors] or [error.title]
    names = _COMPARED if config.family == stored.family == "gpt" else _COMPARED + _COMPARED_ROPE
    different = [name for name in names if getattr(stored, name) != getattr(config, name)]
    if computed_with(stored.experts) != computed_with(config.experts):
        different.append("experts")
    return [
        f"config.json says {name}={getattr(stored, name)!r}, the model has {getattr(config, name)!r}; build "
        "the model from the folder's config, read_hf_config(folder)"
        for name in different
    ]


def config_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Write the config.json of a model with weights of `dtype` ("float32"), for transformers 4 and 5."""
    model_type = dialect_of(config)
    raw: dict[str, Any] = {"model_type": model_type, "torch_dtype": dtype}
    if model_type == OWN_TYPE:
        return raw | dataclasses.asdict(config)
    dialect = DIALECTS[model_type]
    keys = dialect.required | {field: key for field, (key, _) in dialect.optional.items()}
    raw |= {
        "architectures": [dialect.architecture],
        # Special tokens belong to the tokenizer, which we do not have; the defaults of transformers would
        # point outside a small vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    raw |= {key: getattr(config, field) for field, key in keys.items()}
    raw |= {key: values[0] for key, values in dialect.demanded.items() if values[0] is not None}
    if config.family == "gpt":
        return raw | dict.fromkeys(_DROPOUTS, config.dropout) | {"attn_pdrop": 0.0}
    # Their defaults are not ours.
    raw["intermediate_size"] = config.ffn_width
    if dialect.optional["kv_heads"][1] is not None:
        raw["num_key_value_heads"] = config.num_kv_heads
    if "head_width" in keys:
        raw["head_dim"] = config.head_dim
    # Rotary positions in the format of transformers 4, which transformers 5 still reads.
    raw |= {"rope_theta": config.rope_theta, "rope_scaling": None}
    if config.rope_scaling is not None:
        fields = {hf_key: getattr(config.rope_scaling, field) for field, hf_key in _ROPE_SCALING.items()}
        raw["rope_scaling"] = {"rope_type": "llama3", **fields}
    return raw | write_experts(model_type, dialect, config)


def _read_sizes(dialect: Dialect, raw: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    errors += [f"{key}: is missing" for key in dialect.required.values() if key not in raw]
    required = {field: raw.get(hf_key) for field, hf_key in dialect.required.items()}
    optional = {field: raw.get(hf_key, default) for field, (hf_key, default) in dialect.optional.items()}
    values = required | optional
    heads, head_width = values["heads"], values.get("head_width")
    if type(heads) is int and heads > 0 and type(head_width) is int and values["width"] == heads * head_width:
        values["head_width"] = None  # it follows from the others
    return values


def _read_rope(raw: Mapping[str, Any], theta: float, errors: list[str]) -> dict[str, Any]:
    """`rope_parameters` is of transformers 5; `rope_theta` beside `rope_scaling` is of earlier versions."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        errors.append(f"rope_parameters={rope!r}: must be an object")
        return {}
    values = {"rope_theta": rope.get("rope_theta", raw.get("rope_theta", theta))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        missing = [hf_key for hf_key in _ROPE_SCALING.values() if hf_key not in rope]
        errors += [f"rope_parameters: {key} is missing" for key in missing]
        if not missing:
            fields = {field: rope[hf_key] for field, hf_key in _ROPE_SCALING.items()}
            values["rope_scaling"] = _checked(RopeScaling, fields, errors)
    elif kind != "default":
        errors.append(f"rope_type={kind!r}: is not supported; must be 'default' or 'llama3'")
    return values


def _checked(kind: Callable[..., T], values: Mapping[str, Any], errors: list[str]) -> T | None:
    """kind(**values), or None with its errors added to the list."""
    try:
        return kind(**values)
    except UserError as error:
        errors.extend(error.errors)
        return None


# transformers 4 writes the first of a Qwen3-MoE, transformers 5 the second.
_OTHER_KEYS = {"num_experts": "num_local_experts"}

# Lists of layers, and numbers of experts: what no single key of theirs has as we do.
_DENSE_LAYERS, _NUM_SHARED = "mlp_only_layers", "n_shared_experts"
# Whether transformers adds a loss of the gates; whether DeepSeek's is the mean of those of single samples.
_IS_BALANCED, _PER_SAMPLE = "output_router_logits", "seq_aux"


def read_experts(
    model_type: str, dialect: Dialect, raw: Mapping[str, Any], errors: list[str]
) -> dict[str, Any]:
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
    experts = config.experts
    if experts is None:
        return {}
    raw = {key: getattr(experts, name) for name, (key, _) in dialect.experts.items()}
    if model_type == "deepseek":
        raw[_PER_SAMPLE] = False
        raw[_NUM_SHARED] = experts.shared // experts.hidden or None
    else:
        sparse = config.layers - experts.first_dense
        raw[dialect.experts["balance"][0]] = experts.balance * sparse / experts.top_k
        raw[_IS_BALANCED] = experts.balance > 0
    if model_type == "qwen3_moe":
        raw[_DENSE_LAYERS] = list(range(experts.first_dense))
    return raw


def _read_balance(model_type: str, raw: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return the weight of our loss of each layer.

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
    """Return the fields that a model computes with: all but those that it is only trained with."""
    fields = vars(experts) if experts else {}
    return {name: value for name, value in fields.items() if name not in TRAINING_FIELDS}
