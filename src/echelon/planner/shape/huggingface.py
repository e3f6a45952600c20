"""Shapes from Hugging Face's `config.json`: of dense models and of mixtures of experts, by their usual keys.

Models that echelon builds are read by `echelon.models`, so that parameters are counted exactly; others by
the keys that model types share. What is missing, and has no usual value, is an error by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.errors import UserError, raise_errors
from echelon.planner.shape.presets import preset_shape, shape_of
from echelon.planner.shape.shape import Experts, LatentAttention, ModelShape

_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
_FFN = ("intermediate_size", "n_inner", "ffn_dim", "d_ff")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# Model types whose feed-forward part has no gate, and whose layers have biases and LayerNorm.
_PLAIN = (
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "opt",
    "bloom",
    "bert",
    "roberta",
    "mpt",
    "phi",
    "starcoder2",
)
_CHAINS = ("gelu_new", "gelu_fast", "gelu_python", "quick_gelu")
_BOTH_WAYS = ("bert", "roberta", "electra", "deberta")
_LEARNED = ("gpt2", "gpt_neo", "opt", "bert", "roberta", "electra")


def read_shape(text: str) -> ModelShape:
    """Return the shape of a preset, or of a `config.json` (or the folder that has one)."""
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if not (path.suffix == ".json" or path.is_file()):
        return preset_shape(text)
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"'{path}' cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"'{path}' is not a config.json: it has no keys")
    return shape_from_config(raw, name=path.parent.name or "model")


def shape_from_config(raw: Mapping[str, Any], name: str = "model") -> ModelShape:
    """Return the shape that the keys of a `config.json` describe."""
    from echelon.models.hf.config import config_from_hf  # a second of torch

    try:
        return shape_of(config_from_hf(raw), name)
    except UserError:
        return _from_usual_keys(raw.get("text_config") or raw, name)


def _from_usual_keys(raw: Mapping[str, Any], name: str) -> ModelShape:
    sizes = {field: _first(raw, keys) for field, keys in _KEYS.items()}
    missing = [f"{_KEYS[field][0]}: is missing, or no count" for field, size in sizes.items() if size is None]
    raise_errors(f"the config of '{name}'", missing)
    layers, hidden, heads, vocab, sequence = (size or 1 for size in sizes.values())
    model_type = str(raw.get("model_type", ""))
    is_plain = model_type in _PLAIN
    learned = model_type in _LEARNED
    return ModelShape(
        name,
        layers,
        hidden,
        heads,
        vocab,
        sequence,
        kv_heads=_first(raw, ("num_key_value_heads",)) or heads,
        ffn=_first(raw, _FFN) or 4 * hidden,
        head_width=_first(raw, ("head_dim",)) or max(1, hidden // heads),
        gated=not is_plain,
        tied=bool(raw.get("tie_word_embeddings", is_plain)),
        bias=is_plain,
        qk_norm=model_type.startswith("qwen3"),
        norm_vectors=2 if is_plain else 1,
        plain=is_chain(raw, norm_vectors=2 if is_plain else 1),
        learned_positions=sequence if learned else 0,
        bidirectional=model_type in _BOTH_WAYS,
        experts=_experts(raw, hidden),
        latent=_latent(raw),
    )


def is_chain(raw: Mapping[str, Any], norm_vectors: int) -> bool:
    """Whether norms or activation functions of transformers' own model are chains of kernels: RMSNorm
    always is, LayerNorm is not; of GELU, torch has a kernel for the exact one and "gelu_pytorch_tanh"."""
    function = raw.get("activation_function") or raw.get("hidden_act")
    return norm_vectors == 1 or function in _CHAINS


def _first(raw: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = raw.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _experts(raw: Mapping[str, Any], hidden: int) -> Experts | None:
    number = _first(raw, _EXPERTS)
    if number is None or number == 1:
        return None
    width = _first(raw, ("moe_intermediate_size", *_FFN)) or 4 * hidden
    shared = (_first(raw, ("n_shared_experts",)) or 0) * width
    return Experts(
        number,
        _first(raw, ("num_experts_per_tok", "moe_top_k", "top_k")) or 2,
        width,
        _first(raw, ("shared_expert_intermediate_size",)) or shared,
        _first(raw, ("first_k_dense_replace",)) or 0,
        _first(raw, ("decoder_sparse_step", "moe_layer_freq")) or 1,
        has_loss=raw.get("output_router_logits") is True,
    )


def _latent(raw: Mapping[str, Any]) -> LatentAttention | None:
    rank = _first(raw, ("kv_lora_rank",))
    if rank is None:
        return None
    rope, nope, value = (
        _first(raw, (key,)) or 128 for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    return LatentAttention(_first(raw, ("q_lora_rank",)) or 0, rank, rope, nope, value)
