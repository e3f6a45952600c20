"""Tables of how tensor parallelism splits the families of transformers.

The words of the tables are those of tensor_parallel.styles. Query, key and value in one matrix may lie head
by head (GPT-NeoX, Bloom, most of Falcon): a rank's heads are consecutive rows there, so it is a plain column.
"""

from collections.abc import Callable, Mapping
from typing import Any

from echelon.errors import UserError

Table = Mapping[str, str]

# Of models whose trunk is called `model`.
_TRUNK = {
    "model.embed_tokens": "vocabulary",
    "model.layers.*_layernorm": "replicated",
    "model.norm": "replicated",
    "lm_head": "vocabulary",
}

_DENSE = {
    "config.num_attention_heads": "divisible",
    "config.num_key_value_heads": "divisible",
    "model.layers.*.self_attn": "region",  # it reshapes to heads by the shape of its input
    "model.layers.*.self_attn.[qkv]_proj": "column",
    "model.layers.*.self_attn.[qk]_norm": "heads",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
} | _TRUNK

_LLAMA = _DENSE | {"model.layers.*.mlp.gate": "replicated", "model.layers.*.mlp.experts": "experts"}

# Its norms of queries and keys are over all heads together.
_OLMO2 = _DENSE | {"model.layers.*.self_attn.[qk]_norm": "norm"}

_PHI3 = {
    "config.num_attention_heads": "divisible",
    "config.num_key_value_heads": "divisible",
    "model.layers.*.self_attn": "region",
    "model.layers.*.self_attn.qkv_proj": "column:num_attention_heads,num_key_value_heads,num_key_value_heads",
    "model.layers.*.self_attn.config.num_attention_heads": "divided",
    "model.layers.*.self_attn.num_key_value_heads": "divided",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_up_proj": "column/2",
    "model.layers.*.mlp.down_proj": "row",
    "model.layers.*_dropout": "replicated",
} | _TRUNK

# Low-rank projections before the heads are whole, and so is the part of the keys that all heads share.
_DEEPSEEK = {
    "config.num_attention_heads": "divisible",
    "model.layers.*.self_attn": "enclosed",
    "model.layers.*.self_attn.q_proj": "column",
    "model.layers.*.self_attn.q_a_*": "heads",
    "model.layers.*.self_attn.q_b_proj": "column",
    "model.layers.*.self_attn.kv_a_*": "heads",
    "model.layers.*.self_attn.kv_b_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate": "replicated",
    "model.layers.*.mlp.experts": "experts",
    "model.layers.*.mlp.*gate_proj": "column",
    "model.layers.*.mlp.*up_proj": "column",
    "model.layers.*.mlp.*down_proj": "row",
} | _TRUNK

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

_GPT_NEOX = {
    "config.num_attention_heads": "divisible",
    "gpt_neox.embed_in": "vocabulary",
    "gpt_neox.emb_dropout": "replicated",
    "gpt_neox.layers.*.attention": "region",
    "gpt_neox.layers.*.attention.query_key_value": "column",
    "gpt_neox.layers.*.attention.dense": "row",
    "gpt_neox.layers.*.mlp.dense_h_to_4h": "column",
    "gpt_neox.layers.*.mlp.dense_4h_to_h": "row",
    "gpt_neox.layers.*_layernorm": "replicated",
    "gpt_neox.layers.*_dropout": "replicated",
    "gpt_neox.final_layer_norm": "replicated",
    "lm_head": "vocabulary",
}

# Of Bloom and Falcon.
_BIASED = {
    "transformer.word_embeddings": "vocabulary",
    "transformer.h.*.self_attention": "region",
    "transformer.h.*.self_attention.num_heads": "divided",
    "transformer.h.*.self_attention.query_key_value": "column",
    "transformer.h.*.self_attention.attention_dropout": "heads",
    "transformer.h.*.self_attention.dense": "row",
    "transformer.h.*.mlp.dense_h_to_4h": "column",
    "transformer.h.*.mlp.dense_4h_to_h": "row",
    "transformer.h.*_layernorm": "replicated",
    "transformer.ln_f": "replicated",
    "lm_head": "vocabulary",
}

_BLOOM = _BIASED | {
    "config.n_head": "divisible",
    "transformer.word_embeddings_layernorm": "replicated",
    "transformer.h.*.self_attention(alibi)": "heads:n_head",
}

_FALCON = _BIASED | {
    "config.num_attention_heads": "divisible",
    "transformer.h.*.self_attention(alibi)": "heads:num_attention_heads",
    "transformer.h.*.self_attention(attention_mask)": "heads:num_attention_heads",
    "transformer.h.*.ln_*": "replicated",
}

_BERT = {
    "config.num_attention_heads": "divisible",
    "bert.embeddings.word_embeddings": "vocabulary",
    "bert.embeddings.*": "replicated",
    "bert.encoder.layer.*.attention.self": "region",
    "bert.encoder.layer.*.attention.self.query": "column",
    "bert.encoder.layer.*.attention.self.key": "column",
    "bert.encoder.layer.*.attention.self.value": "column",
    "bert.encoder.layer.*.attention.self.dropout": "heads",
    "bert.encoder.layer.*.intermediate.dense": "column",
    "bert.encoder.layer.*.output.dense": "row",
    "bert.encoder.layer.*.output.*": "replicated",
    "bert.pooler.dense": "replicated",
    "cls.predictions": "tied",
    "cls.predictions.transform.*": "replicated",
    "cls.predictions.decoder": "vocabulary",
    "dropout": "replicated",
    "classifier": "replicated",
}

_VIT = {
    "config.num_attention_heads": "divisible",
    "vit.embeddings": "replicated",
    "vit.embeddings.*": "replicated",
    "vit.layers.*.attention": "region",
    "vit.layers.*.attention.[qkv]_proj": "column",
    "vit.layers.*.attention.o_proj": "row",
    "vit.layers.*.mlp.fc1": "column",
    "vit.layers.*.mlp.fc2": "row",
    "vit.layers.*.layernorm_*": "replicated",
    "vit.layers.*.dropout": "replicated",
    "vit.layernorm": "replicated",
    "classifier": "replicated",
}

# timm's, which is known by the name of its class too.
_TIMM_VIT = {
    "": "replicated",  # its own positions and class token
    "patch_embed*": "replicated",
    "blocks.*.attn.num_heads": "divided",
    "blocks.*.attn.attn_dim": "divided",
    "blocks.*.attn.qkv": "column/3",
    "blocks.*.attn.[qk]_norm": "heads",
    "blocks.*.attn.attn_drop": "heads",
    "blocks.*.attn.norm": "norm",
    "blocks.*.attn.proj": "row",
    "blocks.*.mlp.fc1": "column",
    "blocks.*.mlp.drop1": "inner",
    "blocks.*.mlp.norm": "norm",
    "blocks.*.mlp.fc2": "row",
    "blocks.*": "replicated",  # norms, scales, dropouts behind rows
    "*norm*": "replicated",
    "*head*": "replicated",
    "*drop": "replicated",
}

_T5 = {
    "config.num_heads": "divisible",
    "shared": "vocabulary",
    "*coder.embed_tokens": "vocabulary",
    "*Attention.n_heads": "divided",
    "*Attention.[qkv]": "column",
    "*Attention.o": "row",
    "*Attention.relative_attention_bias": "column",  # a number for each head
    "*DenseReluDense.wi*": "column",
    "*DenseReluDense.dropout": "inner",
    "*DenseReluDense.wo": "row",
    "*coder.*layer_norm": "replicated",
    "*coder.*dropout": "replicated",
    "lm_head": "vocabulary",
}


def _bloom(config: Any) -> Table:
    """Refuse a config with which Bloom does not call all its matrices."""
    if config.pretraining_tp > 1 and config.slow_but_exact:
        raise UserError(
            f"tensor: Bloom with pretraining_tp={config.pretraining_tp} and slow_but_exact=True reads the "
            "weights of matrices without calling them; set config.slow_but_exact = False"
        )
    return {}


def _falcon(config: Any) -> Table:
    """Query, key and value of Falcon lie group by group, head by head, or there is one key for all heads."""
    if config.multi_query and not config.new_decoder_architecture:
        one_key = "column:num_attention_heads,1 whole,1 whole"
        return {"transformer.h.*.self_attention.query_key_value": one_key}
    return {"config.num_kv_heads": "divisible", "transformer.h.*.self_attention.num_kv_heads": "divided"}


# The parts of a layer that peft has adapted, by the word of the layer and the part's name; '': all others.
#
#     column   x ─enter─┬─ base: column ────────────────────────┬─ +     A is whole, and used for this rank's
#                       └─ dropout ─ A: whole ─ B: column ──────┘        columns: ranks sum its gradient
#     row      x ─┬─ base: row ─ sum ───────────────────────────┬─ +     B is whole, behind a sum of r numbers
#                 └─ dropout of a part ─ A: row ─ sum ─ B: whole┘        per position
#
# "same": the layer's own style.
PAIRS: Mapping[str, Table] = {
    "column": {"layer": "enclosed", "lora_B": "same", "": "entered"},
    "row": {"lora_A": "row", "lora_B": "replicated", "lora_dropout": "inner"},
    "vocabulary": {"": "replicated"},
    "replicated": {"": "replicated"},
    "heads": {"": "entered"},
}

# Lines that depend on a model's config, and come before those of its table.
CONFIG_LINES: Mapping[str, Callable[[Any], Table]] = {
    "FalconForCausalLM": _falcon,
    "BloomForCausalLM": _bloom,
}

_LIKE_LLAMA = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Olmo")
_LIKE_BERT = ("MaskedLM", "SequenceClassification", "TokenClassification")

# By the name of a model's class.
TENSOR_TABLES: Mapping[str, Table] = {
    **{f"{name}ForCausalLM": _LLAMA for name in _LIKE_LLAMA},
    **{f"BertFor{task}": _BERT for task in _LIKE_BERT},
    "GPT2LMHeadModel": _GPT2,
    "Phi3ForCausalLM": _PHI3,
    "Olmo2ForCausalLM": _OLMO2,
    "GPTNeoXForCausalLM": _GPT_NEOX,
    "FalconForCausalLM": _FALCON,
    "BloomForCausalLM": _BLOOM,
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "ViTForImageClassification": _VIT,
    "T5ForConditionalGeneration": _T5,
    "VisionTransformer": _TIMM_VIT,
}
