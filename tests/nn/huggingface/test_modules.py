"""Properties of single modules: randomness without a dropout module, storage, precision."""

import pytest
import torch
import transformers
from torch import nn
from transformers import MambaConfig

from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.models import cross_entropy
from echelon.nn.dropout.modules import key_dropout, unkeyed_dropout
from echelon.nn.dropout.training_position import scope
from echelon.nn.huggingface.modules import casts_to_float32, draws_by_function, draws_by_head, is_transposed
from echelon.nn.wrapping import Wrapping
from echelon.parallel.layer_sharding import LayerSharding
from echelon.plan import Plan
from echelon.verify import assert_equal
from tests.nn.huggingface.models import case, double, make, tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "mixtral"])
def test_attention_with_a_rate_is_named(kind: str, attention: str) -> None:
    assert unkeyed_dropout(make(kind, attention)) == []
    found = unkeyed_dropout(make(kind, attention, attention_dropout=0.1))
    assert found == [f"model.layers.{number}.self_attn" for number in range(3)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gpt2_reads_only_the_rate_of_its_module(attention: str) -> None:
    found = unkeyed_dropout(make("gpt2", attention, attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1))
    assert found == [f"transformer.h.{number}.attn" for number in range(3)]


def test_gpt2_calls_its_module_in_the_order_of_megatron() -> None:
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
    assert found == [f"model.layers.{number}.mlp" for number in range(3)]


@pytest.mark.usefixtures("warm_contract")
def test_attention_with_a_rate_is_equal_to_one_device() -> None:
    """It draws by a function of torch, for each sample what one device draws for it."""
    assert_equal(case("llama", steps=3, attention_dropout=0.1), "data=2 microbatches=2")
    # The reference computes in float64 by a mode of torch's functions, which is no end of the module's calls.
    assert_equal(case("gpt2", steps=3, attn_pdrop=0.1), "pipeline=2 microbatches=2")


def test_routers_that_draw_are_refused_where_ranks_split_their_experts() -> None:
    model = double("mixtral", router_jitter_noise=0.1)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp.* draw at random inside"):
        LayerSharding(model, Mesh.pretend(Plan(tensor=2), 0), cross_entropy, None, Wrapping())


def test_attention_draws_for_its_own_heads_and_a_jittered_router_for_all_ranks() -> None:
    router = make("mixtral", router_jitter_noise=0.1).model.layers[0].mlp
    attention = make("llama", attention_dropout=0.1).model.layers[0].self_attn
    assert draws_by_function(router)
    assert not draws_by_head(router)
    assert draws_by_function(attention)
    assert draws_by_head(attention)
    assert not draws_by_head(nn.MultiheadAttention(4, 2, dropout=0.1))


def test_only_matrices_of_gpt2_are_transposed() -> None:
    block = make("gpt2").transformer.h[0]
    assert is_transposed(block.mlp.c_fc)
    assert not is_transposed(block.ln_1)
    assert not is_transposed(make("llama").lm_head)
    assert not is_transposed(Conv1D(1, 1, 1))


class Conv1D(nn.Conv1d):
    """Somebody else's class of the same name."""


def test_norms_routers_and_grouped_attention_cast_to_float32() -> None:
    layer = make("mixtral").model.layers[0]
    assert all(map(casts_to_float32, [layer.input_layernorm, layer.mlp.gate, layer.self_attn]))
    assert not casts_to_float32(layer.self_attn.q_proj)
    assert not casts_to_float32(nn.RMSNorm(4))


def test_the_scan_of_mamba_casts_to_float32() -> None:
    model = transformers.MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1))
    mixer = model.get_submodule("backbone.layers.0.mixer")
    assert casts_to_float32(mixer)
    assert not casts_to_float32(mixer.get_submodule("in_proj"))
