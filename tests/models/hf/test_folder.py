"""Against transformers itself, on small random models. Nothing is downloaded."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from echelon.errors import UserError
from echelon.models import build, from_hf_state, load_hf, preset, save_hf, save_hf_state, to_hf_state
from echelon.models.blocks import Rotary
from echelon.models.hf.config import config_to_hf
from tests.models.conftest import SMALL

transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()


def hf_model_of(config, dtype=torch.float32):
    """A transformers model with weights large enough that every one of them shows in the logits."""
    raw = config_to_hf(config, str(dtype).removeprefix("torch."))
    torch.manual_seed(0)
    hf_model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
    for parameter in hf_model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return hf_model.to(dtype).eval()


def ours_of(config, dtype=torch.float32):
    torch.manual_seed(0)
    model = build(config).to(dtype)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


class WideRotary(nn.Module):
    """transformers makes angles in float32 always; this gives its attention the angles in float64."""

    def __init__(self, config):
        super().__init__()
        self.rotary = Rotary.of(config)

    def forward(self, x, position_ids):
        return tuple(torch.cat([t, t], dim=-1)[None] for t in self.rotary.angles(position_ids[0], x.dtype))


def widen(hf_model, config):
    """Take the two float32 casts out of transformers' Llama, so that the rest can be compared in float64."""
    hf_model.model.rotary_emb = WideRotary(config)
    for parent in [hf_model.model, *hf_model.model.layers]:
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)


def assert_same_logits(model, hf_model, tokens, atol):
    with torch.no_grad():
        logits, hf_logits = model(tokens), hf_model(tokens).logits
    assert logits.dtype == hf_logits.dtype
    assert hf_logits.std() > 0.1
    torch.testing.assert_close(logits, hf_logits, rtol=0, atol=atol)


def test_load_what_transformers_saved(config, tokens, tmp_path):
    hf_model = hf_model_of(config)
    hf_model.save_pretrained(tmp_path)
    model = load_hf(tmp_path)
    assert model.config == config if config.ffn else model.config.num_parameters == config.num_parameters
    assert (model.head.projection.weight is model.embedding.tokens.weight) == config.tied
    assert all(p.requires_grad for p in model.parameters())
    assert_same_logits(model, hf_model, tokens, atol=1e-5)


def test_load_in_float64_to_the_last_digits(config, tokens, tmp_path):
    hf_model = hf_model_of(config, torch.float64)
    hf_model.save_pretrained(tmp_path)
    if config.family == "llama":
        widen(hf_model, config)
    assert_same_logits(load_hf(tmp_path), hf_model, tokens, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_transformers_loads_what_we_saved(config, tokens, tmp_path, dtype):
    model = ours_of(config, dtype)
    save_hf(model, tmp_path)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert next(hf_model.parameters()).dtype == dtype
    assert_same_logits(model, hf_model, tokens, atol=1e-5)


def test_names_and_bits_are_those_of_transformers(config, tmp_path):
    hf_model_of(config).save_pretrained(tmp_path / "transformers")
    save_hf(load_hf(tmp_path / "transformers"), tmp_path / "echelon")
    expected = load_file(tmp_path / "transformers/model.safetensors")
    saved = load_file(tmp_path / "echelon/model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)


def test_shards_of_transformers_are_read(config, tokens, tmp_path):
    hf_model = hf_model_of(config)
    hf_model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_same_logits(load_hf(tmp_path), hf_model, tokens, atol=1e-5)


def test_our_shards_are_read_by_both(config, tokens, tmp_path):
    model = ours_of(config)
    save_hf(model, tmp_path, shard_bytes=10_000)
    assert not (tmp_path / "model.safetensors").exists()
    assert torch.equal(load_hf(tmp_path)(tokens), model(tokens))
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_same_logits(model, hf_model, tokens, atol=1e-5)


def test_our_own_round_trip_is_exact(config, tmp_path):
    model = ours_of(config, torch.bfloat16)
    save_hf(model, tmp_path)
    again = load_hf(tmp_path)
    assert again.config == config
    state = again.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(
        torch.equal(state[name], value) and state[name].dtype == value.dtype
        for name, value in model.state_dict().items()
    )


def test_a_state_dict_without_its_module_is_saved_too(config, tmp_path):
    model = ours_of(config)
    save_hf(model, tmp_path / "module")
    save_hf_state(config, model.state_dict(), str(tmp_path / "state"))
    files = ("config.json", "model.safetensors")
    assert all((tmp_path / "module" / f).read_bytes() == (tmp_path / "state" / f).read_bytes() for f in files)


def test_an_interrupted_save_is_not_taken_for_a_whole_one(config, tmp_path, monkeypatch):
    """Saving over an older folder: from the first new byte to the last there is no config.json."""
    save_hf(ours_of(config), tmp_path)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("echelon.state.weight_files.tensor_file._write_tensor", stop)
    with pytest.raises(KeyboardInterrupt):
        save_hf(ours_of(config), tmp_path)
    with pytest.raises(UserError, match=r"config\.json: cannot be read: No such file"):
        load_hf(tmp_path)


def test_errors_of_several_files_are_listed_at_once(config, tmp_path):
    save_hf(ours_of(config), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError) as caught:
        load_hf(tmp_path)
    assert str(tmp_path) in caught.value.title
    assert "model_type=mamba is not supported" in caught.value.errors[0]
    assert "cut short" in caught.value.errors[1]


def test_weights_that_are_not_those_of_the_config(config, tmp_path):
    save_hf(ours_of(config), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vocab_size": 40}))
    with pytest.raises(UserError) as caught:
        load_hf(tmp_path)
    assert len(caught.value.errors) == (1 if config.tied else 2)
    assert "has shape [37, " in caught.value.errors[0]


def test_folders_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        load_hf(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save_hf(build("gpt-tiny"), tmp_path / "file")


def test_models_that_cannot_be_saved(config, tmp_path):
    with pytest.raises(UserError, match="not a Linear"):
        save_hf(nn.Linear(2, 2), tmp_path)
    with torch.device("meta"):
        model = build(config)
    with pytest.raises(UserError, match="has no weights to save"):
        save_hf(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow_cases("gpt-xl", "llama3-8b")
@pytest.mark.parametrize(
    "name",
    [
        "gpt-small",
        "gpt-xl",
        pytest.param("llama2-70b", marks=pytest.mark.slow),
        "llama3-8b",
        pytest.param("llama3-405b", marks=pytest.mark.slow),
    ],
)
def test_presets_are_what_transformers_would_build(name):
    """Same names and shapes as transformers makes from the config that we write, on the meta device."""
    config = preset(name)
    with torch.device("meta"):
        model = build(config)
        raw = transformers.AutoConfig.for_model(**config_to_hf(config, "bfloat16"))
        hf_model = transformers.AutoModelForCausalLM.from_config(raw)
    expected = {name: parameter.shape for name, parameter in hf_model.named_parameters()}
    shapes = {name: tensor.shape for name, tensor in to_hf_state(config, model.state_dict()).items()}
    assert shapes == expected


def test_files_have_the_permissions_that_the_user_gives_new_files(tmp_path: Path) -> None:
    # Weights were readable by their owner alone, as temporary files are, beside a config that all could read.
    before = os.umask(0o027)
    try:
        save_hf(build("gpt-tiny"), tmp_path / "hf")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()}
    assert modes == {"config.json": 0o640, "model.safetensors": 0o640}


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
