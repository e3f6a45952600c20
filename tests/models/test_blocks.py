import pytest
import torch
from torch import nn

from echelon.models import ModelConfig, build
from echelon.models.blocks import INIT_STD, Attention, Linear, reset_parameters
from echelon.models.rotary import Rotary

GROUPED = ModelConfig("llama", layers=8, width=32, heads=4, kv_heads=2, ffn=40, vocab=37, sequence=64)


def attention(config: ModelConfig) -> Attention:
    torch.manual_seed(0)
    return Attention(config, Rotary.of(config)).double()


def test_attention_by_hand():
    """Softmax over explicit scores, one head at a time, without the fused kernel."""
    layer = attention(GROUPED)
    layer.rotary = None
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    heads = []
    for head in range(4):
        rows, kv_rows = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
        query, key = x @ layer.query.weight[rows].T, x @ layer.key.weight[kv_rows].T
        scores = (query @ key.mT / 8**0.5).masked_fill(later, float("-inf"))
        heads.append(scores.softmax(-1) @ (x @ layer.value.weight[kv_rows].T))
    torch.testing.assert_close(layer(x), torch.cat(heads, -1) @ layer.output.weight.T, rtol=0, atol=1e-12)


def test_a_part_of_the_heads_gives_its_part_of_the_sum():
    """What tensor parallelism does: half the heads on each of two ranks, outputs added."""
    unsplit = attention(GROUPED)
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    total = torch.zeros_like(x)
    for rank in range(2):
        part = attention(GROUPED)
        for name in ("query", "key", "value"):
            getattr(part, name).weight = nn.Parameter(getattr(unsplit, name).weight.chunk(2)[rank])
        part.output.weight = nn.Parameter(unsplit.output.weight.chunk(2, dim=1)[rank])
        total += part(x)
    torch.testing.assert_close(total, unsplit(x), rtol=0, atol=1e-12)


def test_initial_values_are_those_of_gpt2():
    torch.manual_seed(0)
    model = build(ModelConfig("gpt", layers=8, width=128, heads=4, vocab=256, sequence=128))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = INIT_STD / 4 if residual else INIT_STD  # sqrt(2 · 8 layers) is 4
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < std * 0.05, name


def test_a_layer_from_meta_gets_the_values_it_would_have_been_built_with(any_config):
    torch.manual_seed(3)
    built = build(any_config)
    with torch.device("meta"):
        empty = build(any_config)
    torch.manual_seed(3)
    for layer, reference in zip(empty.layers(), built.layers(), strict=True):
        layer.to_empty(device="cpu")
        reset_parameters(layer)
        values, expected = layer.state_dict(), reference.state_dict()
        if any_config.tied:  # the tied weight is drawn by the embedding alone
            values.pop("projection.weight", None)
            expected.pop("projection.weight", None)
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], expected[name]) for name in expected)


def test_a_part_without_initial_values_is_a_mistake_of_ours():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

    with pytest.raises(AssertionError, match="Bare does not know"):
        reset_parameters(nn.Sequential(Linear(2, 2, bias=True), Bare()))
