"""The model types of Hugging Face that we read and write: which keys of config.json have our fields.

A model that none of them has (a GPT with experts, another gate than softmax, a capacity) is of our own type,
`echelon`: its config.json has our fields, and its files our names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from echelon.models.config import Family, ModelConfig

OWN_TYPE = "echelon"


@dataclass(frozen=True)
class Dialect:
    family: Family
    architecture: str
    fits: Callable[[ModelConfig], bool]  # whether it can hold this config
    required: dict[str, str]  # our field -> their key
    optional: dict[str, tuple[str, Any]]  # our field -> their key, and its default
    demanded: dict[str, tuple[Any, ...]]  # their key -> the supported values; the first is the default
    experts: dict[str, tuple[str, Any]] = field(default_factory=dict)  # as `optional`, of ExpertsConfig
    rope_theta: float = 10000.0  # its default
    qk_norm: bool = False


def dialect_of(config: ModelConfig) -> str:
    return next((name for name, dialect in DIALECTS.items() if dialect.fits(config)), OWN_TYPE)


def _fits_dense(family: Family, qk_norm: bool) -> Callable[[ModelConfig], bool]:
    return lambda config: config.family == family and config.experts is None and config.qk_norm == qk_norm


def _has_softmax_gate(config: ModelConfig) -> bool:
    experts = config.experts
    if config.family != "llama" or experts is None or experts.shared_gate:
        return False
    return experts.gate == "softmax" and experts.capacity is None and not experts.jitter


def _fits_mixtral(config: ModelConfig) -> bool:
    experts = config.experts
    if experts is None or config.qk_norm or not _has_softmax_gate(config):
        return False
    return experts.normalize and not experts.shared and not experts.first_dense


def _fits_qwen3_moe(config: ModelConfig) -> bool:
    return _has_softmax_gate(config) and config.qk_norm and not (config.experts and config.experts.shared)


def _fits_deepseek(config: ModelConfig) -> bool:
    experts = config.experts
    if experts is None or config.qk_norm or config.head_width is not None:
        return False
    return _has_softmax_gate(config) and experts.shared % experts.hidden == 0


_SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "sequence": "max_position_embeddings",
}
_OPTIONS = {
    "kv_heads": ("num_key_value_heads", None),
    "norm_epsilon": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
    "head_width": ("head_dim", None),
}
_DEMANDED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "quantization_config": (None,),
}
_NO_WINDOW: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False,)}
_NUM_CHOSEN = {"top_k": ("num_experts_per_tok", 2), "z_loss": ("router_z_loss_coef", 0.0)}

DIALECTS = {
    "gpt2": Dialect(
        family="gpt",
        architecture="GPT2LMHeadModel",
        fits=_fits_dense("gpt", qk_norm=False),
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
    "llama": Dialect(
        family="llama",
        architecture="LlamaForCausalLM",
        fits=_fits_dense("llama", qk_norm=False),
        required=_SIZES | {"ffn": "intermediate_size"},
        optional=_OPTIONS,
        demanded=_DEMANDED | {"mlp_bias": (False,)},
    ),
    "qwen3": Dialect(
        family="llama",
        architecture="Qwen3ForCausalLM",
        fits=_fits_dense("llama", qk_norm=True),
        required=_SIZES | {"ffn": "intermediate_size"},
        optional=_OPTIONS | {"kv_heads": ("num_key_value_heads", 32), "head_width": ("head_dim", 128)},
        demanded=_DEMANDED | _NO_WINDOW,
        qk_norm=True,
    ),
    "mixtral": Dialect(
        family="llama",
        architecture="MixtralForCausalLM",
        fits=_fits_mixtral,
        required=_SIZES,
        optional=_OPTIONS | {"kv_heads": ("num_key_value_heads", 8), "norm_epsilon": ("rms_norm_eps", 1e-5)},
        demanded=_DEMANDED | {"sliding_window": (None,), "router_jitter_noise": (0.0,)},
        experts=_NUM_CHOSEN
        | {
            "num_experts": ("num_local_experts", 8),
            "hidden": ("intermediate_size", 14336),
            "balance": ("router_aux_loss_coef", 0.001),
        },
        rope_theta=1e6,
    ),
    "qwen3_moe": Dialect(
        family="llama",
        architecture="Qwen3MoeForCausalLM",
        fits=_fits_qwen3_moe,
        required=_SIZES | {"ffn": "intermediate_size"},
        optional=_OPTIONS | {"kv_heads": ("num_key_value_heads", 4)},
        demanded=_DEMANDED | _NO_WINDOW | {"decoder_sparse_step": (1,)},
        experts=_NUM_CHOSEN
        | {
            "top_k": ("num_experts_per_tok", 8),
            "num_experts": ("num_experts", 128),
            "hidden": ("moe_intermediate_size", 768),
            "normalize": ("norm_topk_prob", False),
            "balance": ("router_aux_loss_coef", 0.001),
        },
        qk_norm=True,
    ),
    "deepseek": Dialect(
        family="llama",
        architecture="DeepseekForCausalLM",
        fits=_fits_deepseek,
        required=_SIZES | {"ffn": "intermediate_size"},
        optional={name: key for name, key in _OPTIONS.items() if name != "head_width"},
        demanded=_DEMANDED | {"moe_layer_freq": (1,), "scoring_func": ("softmax",)},
        experts=_NUM_CHOSEN
        | {
            "num_experts": ("n_routed_experts", None),
            "hidden": ("moe_intermediate_size", 1407),
            "normalize": ("norm_topk_prob", False),
            "first_dense": ("first_k_dense_replace", 0),
            "balance": ("aux_loss_alpha", 0.001),
        },
    ),
}
