"""The table, by the files that it describes; test_hf_state.py has the table by hand."""

import pytest
import torch

from echelon.models import build, save_hf
from echelon.state.ownership import run_slices
from echelon.state.weight_files.weight_folder import WeightFolder
from tests.models.conftest import SMALL


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
