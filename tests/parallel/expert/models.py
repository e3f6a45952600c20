"""Small models with experts and their trainings; importable, so that ranks can build them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from echelon.models import cross_entropy
from echelon.nn.experts import Gate, SoftmaxGate
from echelon.verify import Case
from tests.cases import adamw
from tests.nn.experts.models import EXPERTS, SEQUENCE, VOCAB, WIDTH, make_model
from tests.nn.huggingface.models import make
from tests.nn.huggingface.models import tokens as huggingface_tokens


def plain_gate(top_k: int = 2) -> Gate:
    return SoftmaxGate(WIDTH, EXPERTS, top_k, normalize=top_k > 1)


def plain_model() -> nn.Module:
    return make_model(plain_gate)


def tokens(step: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    """Some targets of the first sample are left out."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randint(VOCAB, (2, samples, SEQUENCE), generator=generator)
    targets[0, : 3 + step % 3] = -100
    return inputs, targets


def experts_case(
    make: Callable[[], nn.Module] = plain_model,
    samples: int = 8,
    steps: int = 20,
    clip: float | None = 1.0,
) -> Case:
    return Case(make, partial(tokens, samples=samples), cross_entropy, adamw, steps=steps, clip=clip)


TENSOR_TABLE = {"blocks.*.mlp.gate": "replicated", "blocks.*.mlp.experts": "experts"}

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 16,
    "experts_implementation": "eager",  # grouped products have no float64
}
_KINDS: dict[str, dict[str, Any]] = {
    "qwen2_moe": _SIZES | {"shared_expert_intermediate_size": 8},
    "qwen3_moe": _SIZES | {"head_dim": 4, "norm_topk_prob": True},
}


def transformers_model(kind: str) -> nn.Module:
    """A mixture of experts as transformers has it, with random weights."""
    if kind not in _KINDS:
        return make(kind)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **_KINDS[kind])
    )
    return model


def transformers_case(kind: str, steps: int) -> Case:
    return Case(partial(transformers_model, kind), huggingface_tokens, cross_entropy, adamw, steps=steps)
