"""Models of transformers on one rank, with their own loss: what one device with little memory needs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import echelon
from tests.cases import adamw
from tests.nn.huggingface.models import VOCAB, make


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertForMaskedLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: make("llama"),
    "gpt2": lambda: make("gpt2", tie_word_embeddings=True),
    "bert": _bert,
    "t5": _t5,
}


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (4, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.flip(0)}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().double().train()


@cache
def plain_weights(kind: str) -> dict[str, Tensor]:
    model: Any = build(kind)
    optimizer = adamw(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        model(**batch(step)).loss.backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    "plan", ["offload=optimizer", "update=backward", "update=last-backward microbatches=2"]
)
@pytest.mark.parametrize("kind", MODELS)
def test_units_need_no_layers(kind: str, plan: str) -> None:
    """A Llama's layers are made on the fly, where its own forward runs: KeyError: Embedding(…)."""
    with echelon.parallelize(build(kind), f"{plan} precision=fp64", optimizer=adamw) as engine:
        for step in range(2):
            engine.step(batch(step))
        weights = engine.full_state_dict()
    for name, expected in plain_weights(kind).items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-9)
