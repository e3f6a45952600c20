"""Shapes of modules: by config, and by a run on fake tensors."""

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models import build, preset
from echelon.planner.shape.module import shape_of_module
from echelon.planner.shape.presets import preset_shape


class Block(nn.Module):
    """A layer of somebody's own, with one matrix for query, key and value."""

    def __init__(self, width: int, heads: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.heads, self.gated = heads, gated
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gate = nn.Linear(width, hidden) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        heads = [each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        hidden = nn.functional.silu(self.up(y))
        return x + self.down(hidden * self.gate(y) if self.gate is not None else hidden)


def own_model(gated: bool, layers: int = 3) -> nn.Sequential:
    blocks = nn.Sequential(*(Block(256, 4, 512, gated) for _ in range(layers)))
    return nn.Sequential(nn.Embedding(1000, 256), blocks, nn.LayerNorm(256), nn.Linear(256, 1000))


@pytest.mark.parametrize("gated", [False, True])
def test_a_model_of_ones_own_is_traced(gated: bool) -> None:
    model = own_model(gated)
    shape = shape_of_module(model, torch.zeros(1, 64, dtype=torch.long))
    assert (shape.layers, shape.hidden, shape.heads, shape.head_width) == (3, 256, 4, 64)
    assert (shape.ffn, shape.gated, shape.vocab, shape.sequence) == (512, gated, 1000, 64)
    assert not shape.tied
    assert not shape.bidirectional
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert abs(shape.other_parameters) < 0.01 * shape.num_parameters


def test_a_trace_needs_no_memory() -> None:
    with torch.device("meta"):
        model = own_model(gated=True, layers=2)
        inputs = torch.zeros(4, 4096, dtype=torch.long)
    assert shape_of_module(model, inputs).sequence == 4096


def test_grouped_heads_and_an_encoder_are_seen() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    shape = shape_of_module(encoder.train(), torch.zeros(2, 16, 64))
    assert shape.bidirectional
    assert shape.num_parameters == sum(parameter.numel() for parameter in encoder.parameters())


def test_models_with_a_config_need_no_run() -> None:
    assert shape_of_module(build("llama-tiny"), name="llama-tiny") == preset_shape("llama-tiny")


def test_a_transformers_model_is_read_by_its_config() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=100
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shape = shape_of_module(model)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.plain
    assert preset("llama-tiny").layers == 4


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(UserError, match="give the inputs"):
        shape_of_module(nn.Linear(2, 2))
    with pytest.raises(UserError, match="no stack of transformer layers"):
        shape_of_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(1, 8))
    with pytest.raises(UserError, match="cannot be run on fake tensors"):
        shape_of_module(nn.Linear(2, 2), torch.zeros(1, 3))
