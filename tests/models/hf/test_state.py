import pytest
import torch

from echelon.errors import UserError
from echelon.models import build, from_hf_state, to_hf_state
from tests.models.conftest import SMALL


def state_of(config):
    torch.manual_seed(0)
    model = build(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)  # so that no two tensors are alike, as fresh norms and biases are
    return model.state_dict()


def same_bits(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def errors_of(function, config, state):
    with pytest.raises(UserError) as caught:
        function(config, state)
    return caught.value.errors


def test_there_and_back_keeps_names_and_bits(config):
    state = state_of(config)
    hf_state = to_hf_state(config, state)
    assert same_bits(from_hf_state(config, hf_state), state)
    assert same_bits(to_hf_state(config, from_hf_state(config, hf_state)), hf_state)


def test_tensors_of_ours_share_no_memory_unless_tied(config):
    ours = from_hf_state(config, to_hf_state(config, state_of(config)))
    assert all(tensor.is_contiguous() for tensor in ours.values())
    places = {tensor.untyped_storage().data_ptr() for tensor in ours.values()}
    assert len(places) == len(ours) - config.tied


def test_gpt2_layout_by_hand():
    config = SMALL["gpt"]
    state = state_of(config)
    hf_state = to_hf_state(config, state)
    fused = hf_state["transformer.h.1.attn.c_attn.weight"]
    assert fused.shape == (16, 48)
    assert torch.equal(fused[:, 16:32], state["blocks.1.attention.key.weight"].T)
    fused_bias = hf_state["transformer.h.1.attn.c_attn.bias"]
    assert torch.equal(fused_bias[32:], state["blocks.1.attention.value.bias"])
    assert torch.equal(hf_state["transformer.h.0.mlp.c_fc.weight"], state["blocks.0.mlp.up.weight"].T)
    assert torch.equal(hf_state["transformer.wte.weight"], state["embedding.tokens.weight"])


def test_a_tied_head_may_be_there_or_not():
    config = SMALL["gpt-tied"]
    state = state_of(config)
    hf_state = to_hf_state(config, state)
    assert "lm_head.weight" not in hf_state
    without = {name: tensor for name, tensor in state.items() if name != "head.projection.weight"}
    assert same_bits(to_hf_state(config, without), hf_state)
    with_head = hf_state | {"lm_head.weight": hf_state["transformer.wte.weight"].clone()}
    assert same_bits(from_hf_state(config, with_head), state)


def test_a_tied_head_that_differs_is_a_error():
    config = SMALL["gpt-tied"]
    state = state_of(config)
    other = state | {"head.projection.weight": state["embedding.tokens.weight"] + 1}
    assert "differs from embedding.tokens.weight" in errors_of(to_hf_state, config, other)[0]
    hf_state = to_hf_state(config, state)
    other = hf_state | {"lm_head.weight": hf_state["transformer.wte.weight"] + 1}
    assert "differs from transformer.wte.weight" in errors_of(from_hf_state, config, other)[0]


@pytest.mark.parametrize("name", ["gpt", "llama-tied-stretched"])
def test_files_of_the_bare_model_and_their_constants_are_read(name):
    """The first GPT-2 files name "h.0.…", not "transformer.h.0.…", and hold the causal masks."""
    config = SMALL[name]
    state = state_of(config)
    hf_state = to_hf_state(config, state)
    bare = {n.removeprefix("transformer.").removeprefix("model."): t for n, t in hf_state.items()}
    constants = ("h.0.attn.bias", "h.0.attn.masked_bias", "layers.0.self_attn.rotary_emb.inv_freq")
    bare |= {constant: torch.ones(1) for constant in constants}
    assert same_bits(from_hf_state(config, bare), state)


def test_all_errors_of_their_tensors_at_once():
    config = SMALL["llama"]
    hf_state = to_hf_state(config, state_of(config))
    del hf_state["model.layers.1.mlp.up_proj.weight"]
    hf_state["model.layers.2.mlp.up_proj.weight"] = torch.zeros(40, 32)
    hf_state["model.norm.weight"] = torch.zeros(31)
    hf_state["lm_head.weight"] = hf_state["lm_head.weight"].to(torch.int8)
    assert errors_of(from_hf_state, config, hf_state) == (
        "model.layers.1.mlp.up_proj.weight: is missing",
        "model.layers.2.mlp.up_proj.weight: is not a tensor of this model",
        "model.norm.weight: has shape [31], must be [32]",
        "lm_head.weight: is torch.int8, must be floating point (quantised weights are not read)",
    )


def test_all_errors_of_our_tensors_at_once():
    config = SMALL["gpt"]
    state = state_of(config)
    state["head.norm.bias"] = state["head.norm.bias"][:-1]
    state["extra"] = state.pop("blocks.0.mlp.up.weight")
    assert errors_of(to_hf_state, config, state) == (
        "blocks.0.mlp.up.weight: is missing",
        "extra: is not a tensor of this model",
        "head.norm.bias: has shape [15], must be [16]",
    )
