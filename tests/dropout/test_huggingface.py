"""Dropout that transformers does by functions is found, by the names of the modules that do it."""

import pytest
import torch

from echelon.dropout import key_dropout, scope, unkeyed_dropout
from echelon.errors import UserError
from echelon.wrapping import Wrapping

transformers = pytest.importorskip("transformers")

from tests.layering.models import case, make, tokens  # noqa: E402


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "mixtral"])
def test_attention_with_a_rate_is_named(kind: str, attention: str) -> None:
    assert unkeyed_dropout(make(kind, attention)) == []
    found = unkeyed_dropout(make(kind, attention, attention_dropout=0.1))
    assert found == [f"model.layers.{place}.self_attn" for place in range(3)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_reads_only_the_rate_of_its_module(attention: str) -> None:
    found = unkeyed_dropout(make("gpt2", attention, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1))
    assert found == [f"transformer.h.{place}.attn" for place in range(3)]


def test_but_calls_it_in_the_order_of_megatron() -> None:
    model = make("gpt2", "eager", attn_pdrop=0.5, reorder_and_upcast_attn=True).train()
    assert unkeyed_dropout(model) == []
    key_dropout(model, Wrapping())
    inputs = tokens(0)[0]
    with scope(seed=0, step=0, first_sample=0):
        first = model(inputs).logits
    with scope(seed=0, step=0, first_sample=0):
        assert torch.equal(model(inputs).logits, first)
    with scope(seed=0, step=1, first_sample=0):
        assert not torch.equal(model(inputs).logits, first)


def test_jitter_of_a_router_is_named() -> None:
    found = unkeyed_dropout(make("mixtral", router_jitter_noise=0.1))
    assert found == [f"model.layers.{place}.mlp" for place in range(3)]


def test_the_contract_refuses_it() -> None:
    with pytest.raises(UserError, match=r"dropout inside model.layers.0.self_attn, .*set it to 0"):
        case("llama", attention_dropout=0.1).build()
