import dataclasses

import pytest

from echelon.errors import UserError
from echelon.models import ModelConfig, RopeScaling
from echelon.models.hf.config import config_differences, config_from_hf, config_to_hf

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": 37, "n_positions": 24}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 37,
    "max_position_embeddings": 64,
}
STRETCH = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def errors_of(raw):
    with pytest.raises(UserError) as caught:
        config_from_hf(raw)
    return caught.value.errors


def test_there_and_back(any_config):
    assert config_from_hf(config_to_hf(any_config, "float32")) == any_config


def test_feed_forward_by_rule_is_written_out():
    config = ModelConfig("llama", layers=1, width=32, heads=4, vocab=37, sequence=64)
    assert config_to_hf(config, "float32")["intermediate_size"] == config.ffn_width == 256


def test_left_out_keys_mean_what_transformers_means():
    gpt, llama = config_from_hf(GPT2), config_from_hf(LLAMA)
    assert (gpt.tied, gpt.norm_epsilon, gpt.ffn_width) == (True, 1e-5, 64)
    assert (llama.tied, llama.norm_epsilon, llama.num_kv_heads, llama.rope_theta) == (False, 1e-6, 4, 10000.0)


def test_dropout_of_gpt2_is_that_of_embedding_and_residuals():
    assert config_from_hf(GPT2).dropout == 0.1
    none = GPT2 | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.1}
    config = config_from_hf(none)
    assert config.dropout == 0.0
    dropping = dataclasses.replace(config, dropout=0.25)
    assert config_from_hf(config_to_hf(dropping, "float32")) == dropping
    assert config_to_hf(dropping, "float32")["attn_pdrop"] == 0.0
    (error,) = errors_of(none | {"embd_pdrop": 0.1})
    assert error.startswith("embd_pdrop=0.1 resid_pdrop=0.0: one dropout serves both")


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500.0, "rope_scaling": STRETCH},
        {"rope_parameters": {"rope_theta": 500.0, **STRETCH}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_both_spellings_of_rope(spelling):
    config = config_from_hf(LLAMA | spelling)
    assert config.rope_theta == 500.0
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 16)


@pytest.mark.parametrize("rope", [{"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}])
def test_plain_rope(rope):
    config = config_from_hf(LLAMA | rope)
    assert (config.rope_theta, config.rope_scaling) == (500.0, None)


def test_unknown_model_type():
    with pytest.raises(UserError, match=r"model_type=lama is not supported \(did you mean 'llama'\?\)"):
        config_from_hf(LLAMA | {"model_type": "lama"})
    with pytest.raises(UserError, match="model_type=None is not supported; known: gpt2, llama"):
        config_from_hf({})
    with pytest.raises(UserError, match="model_type=\\['gpt2'\\] is not supported"):
        config_from_hf({"model_type": ["gpt2"]})


def test_all_errors_of_a_gpt2_config_at_once():
    raw = GPT2 | {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True, "n_head": "4"}
    del raw["n_layer"]
    errors = errors_of(raw)
    assert [error.split("=")[0].split(":")[0] for error in errors] == [
        "activation_function",
        "scale_attn_by_inverse_layer_idx",
        "n_layer",
        "layers",
        "heads",
    ]
    assert "must be 'gelu_new' or 'gelu_pytorch_tanh'" in errors[0]


def test_all_errors_of_a_llama_config_at_once():
    errors = errors_of(
        LLAMA
        | {"attention_bias": True, "quantization_config": {"bits": 4}, "rope_scaling": {"type": "linear"}}
    )
    starts = ["attention_bias", "quantization_config", "rope_type"]
    assert [error.split("=")[0] for error in errors] == starts


def test_rope_errors():
    assert errors_of(LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}) == tuple(
        f"rope_parameters: {key} is missing"
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    assert "low factor" in errors_of(LLAMA | {"rope_scaling": STRETCH | {"low_freq_factor": 9.0}})[0]
    assert errors_of(LLAMA | {"rope_scaling": [1]}) == ("rope_parameters=[1]: must be an object",)


def test_heads_of_another_width():
    assert config_from_hf(LLAMA | {"head_dim": 8}).head_width is None
    config = config_from_hf(LLAMA | {"head_dim": 16})
    assert (config.head_width, config.query_width) == (16, 64)
    assert config_to_hf(config, "float32")["head_dim"] == 16
    assert "head_dim=8, the model has 16" in config_differences(config, LLAMA)[0]
    assert errors_of(LLAMA | {"head_dim": 15})[0].startswith("head_width=15: rotary positions turn pairs")


def test_a_config_has_no_difference_to_its_own_file(any_config):
    assert config_differences(any_config, config_to_hf(any_config, "float32")) == []


def test_all_differences_that_change_the_output_are_listed():
    config = config_from_hf(LLAMA)
    other = LLAMA | {
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-3,
        "rope_theta": 500.0,
        "rope_scaling": STRETCH,
    }
    errors = config_differences(config, other)
    names = ["heads", "num_kv_heads", "head_dim", "norm_epsilon", "rope_theta", "rope_scaling"]
    assert [error.removeprefix("config.json says ").split("=")[0] for error in errors] == names
    assert errors[0].startswith("config.json says heads=8, the model has 4; build the model from")
    assert config_differences(config, GPT2)[0].startswith(
        "config.json says family='gpt', the model has 'llama'"
    )


def test_dropout_length_and_ties_may_differ():
    llama = LLAMA | {"max_position_embeddings": 8, "tie_word_embeddings": True}
    assert config_differences(config_from_hf(LLAMA), llama) == []
    gpt = dataclasses.replace(config_from_hf(GPT2), rope_theta=5.0)  # which GPT does not have
    assert config_differences(gpt, GPT2 | {"embd_pdrop": 0.3, "resid_pdrop": 0.0}) == []


def test_what_our_models_cannot_do_is_a_difference():
    config = config_from_hf(LLAMA)
    assert config_differences(config, LLAMA | {"hidden_act": "gelu"}) == [
        "config.json: hidden_act='gelu': is not supported; must be 'silu'"
    ]
    (error,) = config_differences(config, LLAMA | {"model_type": "mistral"})
    assert error.startswith("config.json: model_type=mistral is not supported")
