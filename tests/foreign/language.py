"""Language models of transformers, as they are: small random configs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.foreign.proof import Foreign

VOCAB, SEQUENCE, SAMPLES = 32, 8, 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_BERT = _SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 2}
_WINDOW = {"sliding_window": 3}
_MLA: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "experts_implementation": "eager",
}

# Every model of language: its config, beside the name that transformers has for it.
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": _GROUPED | _WINDOW,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED | {"head_dim": 8},
    "mixtral": _GROUPED | {"num_local_experts": 4, "experts_implementation": "eager"},
    "gemma": _GROUPED | {"head_dim": 4},
    "gemma2": _GROUPED | _WINDOW | {"head_dim": 4, "query_pre_attn_scalar": 4},
    "gemma3_text": _GROUPED | _WINDOW | {"head_dim": 4, "query_pre_attn_scalar": 4},
    "phi": _SIZES | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "phi3": _GROUPED | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "gpt_neox": _SIZES | _STILL,
    "falcon": _SIZES | _STILL | {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "bloom": _SIZES | _STILL | {"n_layer": 2, "n_head": 4},
    "gpt2": _SIZES | {"n_embd": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gptj": _SIZES
    | {"n_embd": 16, "rotary_dim": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": _SIZES | {"ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 16},
    "mpt": _SIZES | {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 32},
    "stablelm": _GROUPED | _STILL,
    "starcoder2": _GROUPED | _STILL | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "cohere": _GROUPED,
    "granite": _GROUPED,
    "mamba": _SIZES | {"state_size": 4, "use_cache": False},
    "deepseek_v2": _SIZES | _MLA | {"num_key_value_heads": 4},
    "deepseek_v3": _SIZES | _MLA | {"num_key_value_heads": 4},
}

MASKED: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": _BERT | {"max_position_embeddings": 40},
    "distilbert": _SIZES
    | {"dim": 16, "n_heads": 4, "n_layers": 2, "hidden_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
    "albert": _BERT | {"embedding_size": 8, "classifier_dropout_prob": 0.0},
    "electra": _BERT | {"embedding_size": 8},
}

SEQUENCE_TO_SEQUENCE: dict[str, dict[str, Any]] = {
    "t5": _SIZES
    | {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    | {"decoder_start_token_id": 0},
    "bart": _SIZES
    | {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0, "decoder_start_token_id": 0}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32}
    | {"decoder_ffn_dim": 32},
}


def _build(kind: str, auto: str, sizes: dict[str, Any]) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model: nn.Module = getattr(transformers, auto).from_config(config, attn_implementation="eager")
    return model


def tokens(step: int) -> dict[str, Tensor]:
    """Sequences of different lengths, padded at the end, as a tokenizer makes them."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(2, VOCAB, (SAMPLES, SEQUENCE), generator=generator)
    lengths = torch.randint(SEQUENCE // 2, SEQUENCE + 1, (SAMPLES, 1), generator=generator)
    mask = (torch.arange(SEQUENCE) < lengths).long()
    return {
        "input_ids": torch.where(mask > 0, ids, 1),
        "attention_mask": mask,
        "labels": torch.where(mask > 0, ids, -100),
    }


def _plain_tokens(step: int) -> dict[str, Tensor]:
    """Without a mask, for models that know none."""
    batch = tokens(step)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


def _case(kind: str, auto: str, sizes: dict[str, Any], batch: Callable[[int], Any] = tokens) -> Foreign:
    return Foreign(partial(_build, kind, auto, sizes), batch)


# Mamba knows no mask; with a window, a padded position would attend to nothing at all.
_WITHOUT_MASK = ("mamba", "mistral", "gemma2", "gemma3_text")

LANGUAGE: dict[str, Foreign] = {
    **{
        kind: _case(kind, "AutoModelForCausalLM", sizes, _plain_tokens if kind in _WITHOUT_MASK else tokens)
        for kind, sizes in CAUSAL.items()
    },
    **{kind: _case(kind, "AutoModelForMaskedLM", sizes) for kind, sizes in MASKED.items()},
    **{kind: _case(kind, "AutoModelForSeq2SeqLM", sizes) for kind, sizes in SEQUENCE_TO_SEQUENCE.items()},
}
