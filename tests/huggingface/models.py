"""Small transformers models with random weights, which ranks can build, and trainings of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from echelon.layering import listed_layers
from echelon.models import cross_entropy
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

# Windows are shorter than the sequence. Grouped matrix products have no float64, which "eager" experts have.
KINDS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen2": _SIZES | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": _SIZES | {"head_dim": 8},
    "mistral": _SIZES | {"sliding_window": 3},
    "mixtral": _SIZES | {"num_local_experts": 4, "experts_implementation": "eager"},
    "gpt2": _GPT2,
}


def make(kind: str, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """A model whose weights are large enough that every one of them shows in the logits."""
    options = KINDS[kind] | {"attn_implementation": attention} | changes
    config = transformers.AutoConfig.for_model(kind, **options)
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
