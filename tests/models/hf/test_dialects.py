"""Which model type of transformers a model has, and what is refused."""

import dataclasses
import json

import pytest
import torch

from echelon.errors import UserError
from echelon.models import build, preset, read_hf_config, save_hf
from echelon.models.hf.config import config_from_hf, config_to_hf
from echelon.models.hf.dialects import dialect_of
from echelon.state.ownership import run_slices
from echelon.state.weight_files.weight_folder import WeightFolder
from tests.models.conftest import MIXTURES, SMALL
from tests.models.hf.test_experts import IN_TRANSFORMERS


@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture_has_its_model_type(name):
    assert dialect_of(MIXTURES[name]) == (name if name in ("deepseek", *IN_TRANSFORMERS) else "echelon")
    for big, wanted in (("mixtral-8x7b", "mixtral"), ("qwen3-30b-a3b", "qwen3_moe")):
        assert dialect_of(preset(big)) == wanted
    assert dialect_of(preset("deepseek-moe-16b")) == "deepseek"
    assert dialect_of(preset("moe-tiny")) == "mixtral"


def test_what_our_models_cannot_do_is_refused():
    raw = config_to_hf(MIXTURES["qwen3_moe"], "float32")
    with pytest.raises(UserError) as caught:
        config_from_hf(raw | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_experts_per_tok": 9})
    starts = ["decoder_sparse_step=2", "mlp_only_layers=[1]", "top_k=9 num_experts=5"]
    assert [error.split(":")[0] for error in caught.value.errors] == starts
    mixtral = config_to_hf(MIXTURES["mixtral"], "float32")
    with pytest.raises(UserError, match="sliding_window=4: is not supported"):
        config_from_hf(mixtral | {"sliding_window": 4})


def test_our_own_type_lists_all_errors(tmp_path):
    config = MIXTURES["echelon"]
    raw = config_to_hf(config, "float32")
    assert config_from_hf(json.loads(json.dumps(raw))) == config
    del raw["layers"]
    raw["experts"] |= {"top_k": 5}
    with pytest.raises(UserError) as caught:
        config_from_hf(raw)
    assert [error.split(":")[0] for error in caught.value.errors][:2] == ["layers", "top_k=5 num_experts=4"]
    stretched = dataclasses.replace(config, rope_scaling=None, tied=False)
    save_hf(build(stretched), tmp_path)
    assert read_hf_config(tmp_path) == stretched


def model_of(config):
    torch.manual_seed(0)
    model = build(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def test_every_half_of_every_tensor_is_read_from_its_place(config, tmp_path):
    model = model_of(config)
    save_hf(model, tmp_path, shard_bytes=10_000)
    with torch.device("meta"):
        weights = WeightFolder(tmp_path, build(config).weight_layout)
    assert weights.errors() == []
    assert len(weights.names()) == len(model.state_dict()) - config.tied
    for name, tensor in model.state_dict().items():
        half = tensor.numel() // 2 + 3  # inside a row
        for begin, end in ((0, half), (half, tensor.numel())):
            boxes = run_slices(name, tuple(tensor.shape), begin, end)
            read = torch.cat([part.flatten() for part in weights.read(name, boxes)])
            assert torch.equal(read, tensor.flatten()[begin:end])


def test_which_of_ours_each_file_tensor_needs():
    with torch.device("meta"):
        layout = build(SMALL["gpt-tied"]).weight_layout()
    fused = layout.tensors["transformer.h.1.attn.c_attn.weight"]
    assert fused.names == [f"blocks.1.attention.{part}.weight" for part in ("query", "key", "value")]
    assert fused.shape == (16, 48)
    assert layout.ties == {"head.projection.weight": "embedding.tokens.weight"}
    assert len(layout.needed_names()) == len({*layout.needed_names()}) == 3 + 2 * 16 + 1


@pytest.mark.parametrize("name", ["gpt-tied", "llama-tied-stretched"])
def test_names_of_the_bare_model_and_a_tied_head(name):
    with torch.device("meta"):
        model = build(SMALL[name])
    names = list(model.weight_layout().tensors)
    bare = [n.removeprefix("transformer.").removeprefix("model.") for n in names]
    constants = ["h.0.attn.bias", "layers.0.self_attn.rotary_emb.inv_freq"]
    layout = model.weight_layout([*bare, *constants, "lm_head.weight"])
    assert list(layout.tensors) == bare
    assert layout.copies == {"lm_head.weight": bare[0]}
    assert layout.ignored == {*constants}
