"""How tensor parallelism splits the families of transformers.

The words of the tables are those of tensor_parallel.styles.
"""

from collections.abc import Mapping

_LLAMA = {
    "config.num_attention_heads": "divisible",
    "config.num_key_value_heads": "divisible",
    "model.embed_tokens": "vocabulary",
    "model.layers.*.self_attn": "region",  # it reshapes to heads by the shape of its input
    "model.layers.*.self_attn.[qkv]_proj": "column",
    "model.layers.*.self_attn.[qk]_norm": "heads",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "model.layers.*.mlp.gate": "replicated",
    "model.layers.*.mlp.experts": "experts",
    "model.layers.*_layernorm": "replicated",
    "model.norm": "replicated",
    "lm_head": "vocabulary",
}

_GPT2 = {
    "config.n_head": "divisible",
    "transformer.wte": "vocabulary",
    "transformer.wpe": "replicated",
    "transformer.drop": "replicated",
    "transformer.h.*.attn.c_attn": "column/3",
    "transformer.h.*.attn.split_size": "divided",
    "transformer.h.*.attn.num_heads": "divided",
    "transformer.h.*.attn.c_proj": "row",
    "transformer.h.*.attn.attn_dropout": "heads",
    "transformer.h.*.attn.resid_dropout": "replicated",
    "transformer.h.*.mlp.c_fc": "column",
    "transformer.h.*.mlp.c_proj": "row",
    "transformer.h.*.mlp.dropout": "replicated",
    "transformer.h.*.ln_*": "replicated",
    "transformer.ln_f": "replicated",
    "lm_head": "vocabulary",
}

# By the name of a model's class.
TENSOR_TABLES: Mapping[str, Mapping[str, str]] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _LLAMA,
    "GPT2LMHeadModel": _GPT2,
}
