"""Small transformers models with random weights, which ranks can build, and trainings of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from echelon.models import cross_entropy
from echelon.nn.layering import listed_layers
from echelon.verify import Case
from tests.cases import adamw, random_tokens

VOCAB, SEQUENCE = 17, 8

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA2 = _SIZES | {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "layer_types": _LAYER_TYPES,
    "sliding_window": 3,
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 5.0,
}
_FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_DEEPSEEK = _SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 6,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,  # even: rotary positions take pairs
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 6,
    "first_k_dense_replace": 1,
    "experts_implementation": "eager",
}
OLDER = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "gpt2")  # in every plan
EAGER_ONLY = ("gemma2", "bloom")

# Windows are shorter than the sequence. Grouped matrix products have no float64, which "eager" experts have.
KINDS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen2": _SIZES | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": _SIZES | {"head_dim": 8},
    "mistral": _SIZES | {"sliding_window": 3},
    "mixtral": _SIZES | {"num_local_experts": 4, "experts_implementation": "eager"},
    "gpt2": _GPT2,
    "gemma": _SIZES | {"head_dim": 8},
    "gemma2": _GEMMA2,
    "gemma3": _SIZES
    | {"model_type": "gemma3_text", "head_dim": 8, "layer_types": _LAYER_TYPES, "sliding_window": 3},
    "phi3": _SIZES | {"pad_token_id": 0, "sliding_window": 3},
    "olmo": _SIZES | {"clip_qkv": 0.5},
    "olmo2": _SIZES,
    "gpt_neox": _SIZES | {"rotary_pct": 0.5},
    "falcon": _FALCON | {"multi_query": True, "parallel_attn": True},
    "falcon-alibi": _FALCON | {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
    "falcon-groups": _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 3, "n_head": 4},
    "deepseek_v2": _DEEPSEEK | {"q_lora_rank": None},
    "deepseek_v3": _DEEPSEEK | {"n_group": 2, "topk_group": 1, "num_local_experts": 4, "n_routed_experts": 4},
}


def make(kind: str, attention: str | None = "sdpa", **changes: Any) -> nn.Module:
    """A model whose weights are large enough that every one of them shows in the logits."""
    options = KINDS[kind] | changes
    if kind not in EAGER_ONLY:
        options = {"attn_implementation": attention} | options
    name = options.pop("model_type", kind.partition("-")[0])
    config = transformers.AutoConfig.for_model(name, **options)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    return model


def double(kind: str, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """In float64, always with the same weights."""
    torch.manual_seed(0)
    return make(kind, attention, **changes).double()


def chained(model: nn.Module, value: Any) -> Any:
    """The output of the listed layers, one after the other."""
    for layer in listed_layers(model):
        value = layer(value)
    return value


def tokens(step: int, samples: int = 5) -> tuple[Tensor, Tensor]:
    """No number of microbatches here divides the number of samples; some targets do not count."""
    return random_tokens(step, (samples, SEQUENCE), VOCAB)


def case(kind: str, steps: int = 20, make_model: Callable[..., nn.Module] = make, **changes: Any) -> Case:
    return Case(partial(make_model, kind, **changes), tokens, cross_entropy, adamw, steps=steps)
