"""Mixtures of experts against transformers itself, on small random models. Nothing is downloaded."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from echelon.errors import UserError
from echelon.models import build, from_hf_state, load_hf, save_hf, to_hf_state
from echelon.models.hf.config import config_differences, config_from_hf, config_to_hf
from echelon.nn.experts import auxiliary_loss
from tests.models.conftest import MIXTURES
from tests.models.hf.test_folder import WideRotary, assert_same_logits, hf_model_of, ours_of

transformers = pytest.importorskip("transformers")
IN_TRANSFORMERS = ["mixtral", "qwen3_moe"]


def widen(hf_model, config, monkeypatch):
    """Take the float32 casts out of transformers' model, so that the rest can be compared in float64."""
    hf_model.set_experts_implementation("eager")
    hf_model.model.rotary_emb = WideRotary(config)
    for parent in list(hf_model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=config.norm_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)
    softmax = nn.functional.softmax
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim=-1, **_: softmax(x, dim))


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_load_what_transformers_saved(name, tokens, tmp_path, monkeypatch):
    config = MIXTURES[name]
    hf_model = hf_model_of(config, torch.float64)
    hf_model.save_pretrained(tmp_path)
    model = load_hf(tmp_path)
    assert model.config == config
    widen(hf_model, config, monkeypatch)
    assert_same_logits(model, hf_model, tokens, atol=1e-10)


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_transformers_loads_what_we_saved(name, tokens, tmp_path):
    model = ours_of(MIXTURES[name])
    save_hf(model, tmp_path, shard_bytes=10_000)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_same_logits(model, hf_model, tokens, atol=1e-5)


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_names_and_bits_are_those_of_transformers(name, tmp_path):
    hf_model_of(MIXTURES[name]).save_pretrained(tmp_path / "transformers")
    save_hf(load_hf(tmp_path / "transformers"), tmp_path / "echelon")
    expected = load_file(tmp_path / "transformers/model.safetensors")
    saved = load_file(tmp_path / "echelon/model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


@pytest.mark.slow_cases("gshard", "hierarchical", "noisy-top-k", "qwen3_moe")
@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture_there_and_back(name, tokens, tmp_path):
    model = ours_of(MIXTURES[name]).eval()
    save_hf(model, tmp_path)
    loaded = load_hf(tmp_path).eval()
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))
    state = to_hf_state(model.config, model.state_dict())
    back = from_hf_state(model.config, state)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


def test_names_of_deepseek():
    names = to_hf_state(MIXTURES["deepseek"], build(MIXTURES["deepseek"]).state_dict())
    block = "model.layers.2.mlp."
    assert names[f"{block}gate.weight"].shape == (6, 32)
    assert names[f"{block}experts.5.gate_proj.weight"].shape == (8, 32)
    assert names[f"{block}shared_experts.down_proj.weight"].shape == (32, 16)
    assert names["model.layers.1.mlp.gate_proj.weight"].shape == (40, 32)


def test_a_missing_expert_and_a_wrong_one_are_named(tmp_path):
    save_hf(ours_of(MIXTURES["mixtral"]), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_local_experts": 5}))
    with pytest.raises(UserError) as caught:
        load_hf(tmp_path)
    missing = "model.layers.0.block_sparse_moe.experts.4.w1.weight: is missing"
    assert any(missing in error for error in caught.value.errors)
    assert any("gate.weight: has shape [4, 32], must be [5, 32]" in error for error in caught.value.errors)


def test_loss_weights_may_differ_but_not_what_is_computed():
    config = MIXTURES["qwen3_moe"]
    raw = config_to_hf(config, "float32")
    assert config_differences(config, raw | {"router_aux_loss_coef": 0.5}) == []
    (error,) = config_differences(config, raw | {"norm_topk_prob": True})
    assert error.startswith("config.json says experts=ExpertsConfig(")


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
@pytest.mark.parametrize("layers", [1, 3])
def test_balance_is_the_loss_of_transformers(name, layers, tokens, tmp_path):
    """Of one layer, or of layers whose probabilities are alike; it was layers / top_k times as large."""
    experts = dataclasses.replace(MIXTURES[name].experts, first_dense=0, balance=0.0)
    config = dataclasses.replace(MIXTURES[name], layers=layers, experts=experts, ffn=None)
    raw = config_to_hf(config, "float32") | {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    ours = ours_of(config_from_hf(raw))
    if layers > 1:
        for block in ours.blocks:
            nn.init.zeros_(block.mlp.gate.weight)
    save_hf(ours, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.router_aux_loss_coef == pytest.approx(0.5)
    assert theirs.config.output_router_logits
    theirs.set_experts_implementation("eager")
    ours.train()(tokens)
    expected = 0.5 * theirs(tokens).aux_loss
    torch.testing.assert_close(auxiliary_loss(ours), expected, rtol=1e-5, atol=0)


def test_a_balance_that_is_not_trained_with_is_not_read():
    for name in IN_TRANSFORMERS:
        raw = config_to_hf(MIXTURES[name], "float32")
        assert config_from_hf(raw).experts.balance == MIXTURES[name].experts.balance > 0
        assert config_from_hf(raw | {"output_router_logits": False}).experts.balance == 0
    raw = config_to_hf(MIXTURES["deepseek"], "float32")
    assert config_from_hf(raw | {"aux_loss_alpha": 0.3}).experts.balance == 0.3
    assert config_from_hf(raw | {"seq_aux": True}).experts.balance == 0
