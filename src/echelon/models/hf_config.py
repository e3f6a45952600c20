"""config.json of a Hugging Face folder <-> `ModelConfig`, for model types gpt2 and llama.

Options that our models do not have (biases in Llama, another activation, quantised weights, …) are refused by
name: loading them anyway would give a model that runs and is wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from echelon.errors import UserError, did_you_mean, raise_errors
from echelon.models.config import Family, ModelConfig, RopeScaling

T = TypeVar("T")


@dataclass(frozen=True)
class _Dialect:
    """The keys of one model type for our fields."""

    family: Family
    architecture: str
    required: dict[str, str]  # our field -> their key
    optional: dict[str, tuple[str, Any]]  # our field -> their key, and its default
    demanded: dict[str, tuple[Any, ...]]  # their key -> the supported values; the first is the default


_DIALECTS = {
    "gpt2": _Dialect(
        family="gpt",
        architecture="GPT2LMHeadModel",
        required={
            "layers": "n_layer",
            "width": "n_embd",
            "heads": "n_head",
            "vocab": "vocab_size",
            "sequence": "n_positions",
        },
        optional={
            "ffn": ("n_inner", None),
            "norm_epsilon": ("layer_norm_epsilon", 1e-5),
            "tied": ("tie_word_embeddings", True),
        },
        demanded={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "quantization_config": (None,),
        },
    ),
    "llama": _Dialect(
        family="llama",
        architecture="LlamaForCausalLM",
        required={
            "layers": "num_hidden_layers",
            "width": "hidden_size",
            "heads": "num_attention_heads",
            "ffn": "intermediate_size",
            "vocab": "vocab_size",
            "sequence": "max_position_embeddings",
        },
        optional={
            "kv_heads": ("num_key_value_heads", None),
            "norm_epsilon": ("rms_norm_eps", 1e-6),
            "tied": ("tie_word_embeddings", False),
        },
        demanded={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "quantization_config": (None,),
        },
    ),
}

_ROPE_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_sequence": "original_max_position_embeddings",
}

# Of GPT-2, by default 0.1. `attn_pdrop` is ignored, because our attention has no dropout inside.
_DROPOUTS = ("embd_pdrop", "resid_pdrop")

_COMPARED = ("family", "layers", "width", "heads", "num_kv_heads", "ffn_width", "vocab", "norm_epsilon")
_COMPARED_ROPE = ("rope_theta", "rope_scaling")


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed config.json; one UserError lists everything that is missing, wrong or not supported."""
    model_type = str(raw.get("model_type"))
    if model_type not in _DIALECTS:
        near = did_you_mean(model_type, _DIALECTS)
        raise UserError(f"config.json: model_type={model_type} is not supported{near}")
    dialect = _DIALECTS[model_type]
    errors = _demand_errors(dialect, raw)
    values = _read_sizes(dialect, raw, errors)
    values |= _read_rope(raw, errors) if model_type == "llama" else _read_dropout(raw, errors)
    config = _checked(ModelConfig, {"family": dialect.family, **values}, errors)
    if model_type == "llama" and config is not None and raw.get("head_dim") not in (None, config.head_width):
        errors.append(
            f"head_dim={raw['head_dim']!r}: must be hidden_size / num_attention_heads, {config.head_width}; "
            "heads of another width are not supported"
        )
    raise_errors("config.json", errors)
    assert config is not None
    return config


def config_differences(config: ModelConfig, raw: Mapping[str, Any]) -> list[str]:
    """Where a parsed config.json is that of another model than `config`, or of none that we have.

    Dropout may differ, and so may the length of sequences: learned positions show it in their shape. Whether
    weights are tied is seen in the files.
    """
    try:
        stored = config_from_hf({key: value for key, value in raw.items() if key not in _DROPOUTS})
    except UserError as error:
        return [f"config.json: {each}" for each in error.errors] or [error.title]
    names = _COMPARED if config.family == stored.family == "gpt" else _COMPARED + _COMPARED_ROPE
    return [
        f"config.json says {name}={theirs!r}, the model has {ours!r}; build the model from the folder's "
        "config, read_hf_config(folder)"
        for name in names
        if (theirs := getattr(stored, name)) != (ours := getattr(config, name))
    ]


def config_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a model with weights of `dtype` ("float32"), as transformers 4 and 5 read it."""
    model_type, dialect = next((name, d) for name, d in _DIALECTS.items() if d.family == config.family)
    keys = dialect.required | {field: key for field, (key, _) in dialect.optional.items()}
    raw: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [dialect.architecture],
        "torch_dtype": dtype,
        # Special tokens belong to the tokenizer, which we do not have; the defaults of transformers would
        # point outside a small vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    raw |= {key: getattr(config, field) for field, key in keys.items()}
    if config.family == "llama":
        raw["intermediate_size"] = config.ffn_width  # their default is not ours
    raw |= {key: values[0] for key, values in dialect.demanded.items() if values[0] is not None}
    return raw | (_write_rope(config) if config.family == "llama" else _write_dropout(config))


def _demand_errors(dialect: _Dialect, raw: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}={raw[key]!r}: is not supported; must be {' or '.join(map(repr, values))}"
        for key, values in dialect.demanded.items()
        if raw.get(key, values[0]) not in values
    ]


def _read_sizes(dialect: _Dialect, raw: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    errors += [f"{key}: is missing" for key in dialect.required.values() if key not in raw]
    required = {field: raw.get(hf_key) for field, hf_key in dialect.required.items()}
    optional = {field: raw.get(hf_key, default) for field, (hf_key, default) in dialect.optional.items()}
    return required | optional


def _read_dropout(raw: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    embedding, residual = (raw.get(key, 0.1) for key in _DROPOUTS)
    if embedding != residual:
        errors.append(
            f"embd_pdrop={embedding!r} resid_pdrop={residual!r}: one dropout serves both; make them equal"
        )
    return {"dropout": residual}


def _write_dropout(config: ModelConfig) -> dict[str, Any]:
    return dict.fromkeys(_DROPOUTS, config.dropout) | {"attn_pdrop": 0.0}


def _read_rope(raw: Mapping[str, Any], errors: list[str]) -> dict[str, Any]:
    """`rope_parameters` is of transformers 5; `rope_theta` beside `rope_scaling` is of earlier versions."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        errors.append(f"rope_parameters={rope!r}: must be an object")
        return {}
    values = {"rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10000.0))}
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


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    """In the format of transformers 4, which transformers 5 still reads."""
    raw: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": None}
    if config.rope_scaling is not None:
        fields = {hf_key: getattr(config.rope_scaling, field) for field, hf_key in _ROPE_SCALING.items()}
        raw["rope_scaling"] = {"rope_type": "llama3", **fields}
    return raw


def _checked(kind: Callable[..., T], values: Mapping[str, Any], errors: list[str]) -> T | None:
    """kind(**values), or None with its errors added to the list."""
    try:
        return kind(**values)
    except UserError as error:
        errors.extend(error.errors)
        return None
