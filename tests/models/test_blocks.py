import math

import pytest
import torch
from torch import nn

from echelon.models import ModelConfig, RopeScaling, build
from echelon.models.blocks import INIT_STD, Attention, Linear, Rotary, reset_parameters, rotate

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


PLAIN = Rotary(head_width=4, theta=100.0, scaling=None)


def test_angles_by_hand():
    cos, sin = PLAIN.angles(torch.tensor([0, 3]), torch.float64)
    turns = torch.tensor([[0.0, 0.0], [3.0, 3.0 / math.sqrt(100.0)]], dtype=torch.float64)
    torch.testing.assert_close(cos, turns.cos(), rtol=0, atol=1e-15)
    torch.testing.assert_close(sin, turns.sin(), rtol=0, atol=1e-15)


def test_angles_are_never_below_float32_and_stay_float64():
    positions = torch.arange(3)
    kinds = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
    for dtype, computed in kinds.items():
        assert {t.dtype for t in PLAIN.angles(positions, dtype)} == {computed}


def test_a_part_of_a_sequence_turns_as_it_does_within_the_whole():
    angles = PLAIN.angles(torch.arange(10), torch.float64)
    part = PLAIN.angles(torch.arange(6, 10), torch.float64)
    x = torch.randn(1, 2, 10, 4, dtype=torch.float64)
    assert torch.equal(rotate(x, angles)[:, :, 6:], rotate(x[:, :, 6:], part))


def test_scores_depend_on_the_distance_alone():
    x, y = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64)

    def score(at: int, other: int) -> torch.Tensor:
        turned = [rotate(t, PLAIN.angles(torch.tensor([p]), torch.float64)) for t, p in ((x, at), (y, other))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=0, atol=1e-12)
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3


def test_rotation_keeps_type_and_pairs_the_halves():
    quarter = (torch.zeros(1, 2), torch.ones(1, 2))
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], dtype=torch.bfloat16)
    turned = rotate(x, quarter)
    assert turned.dtype == torch.bfloat16
    assert turned.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]


def test_stretching_keeps_fast_pairs_and_slows_slow_ones():
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_sequence=64)
    one = torch.tensor([1])
    turns = torch.asin(Rotary(16, 10000.0, None).angles(one, torch.float64)[1])
    stretched = torch.asin(Rotary(16, 10000.0, scaling).angles(one, torch.float64)[1])
    ratio = stretched[0, 1:] / turns[0, 1:]
    # Turns within 64 positions: 3.2, 1.0, 0.32, …; between 4 and 1 is blended, below 1 is slowed in full.
    blend = (64 * 10 ** (-0.5) / (2 * math.pi) - 1) / 3
    expected = [blend + (1 - blend) / 8, (b := (6.4 / (2 * math.pi) - 1) / 3) + (1 - b) / 8, *[1 / 8] * 5]
    torch.testing.assert_close(ratio, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    fast = Rotary(16, 10000.0, RopeScaling(8.0, 1.0, 4.0, 10**9)).angles(one, torch.float64)[1]
    assert torch.equal(torch.asin(fast)[0, :6], turns[0, :6])
