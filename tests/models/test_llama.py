import pytest
import torch

from echelon.errors import UserError
from echelon.models import Llama, ModelConfig

CONFIG = ModelConfig("llama", layers=2, width=32, heads=4, kv_heads=2, ffn=40, vocab=37, sequence=24)


def test_names_of_parameters():
    parts = ["query", "key", "value", "output"]
    block = [f"attention.{part}" for part in parts] + ["mlp.gate", "mlp.up", "mlp.down"]
    names = {f"blocks.{i}.{part}.weight" for i in range(2) for part in [*block, "attention_norm", "mlp_norm"]}
    names |= {"embedding.tokens.weight", "head.norm.weight", "head.projection.weight"}
    assert {name for name, _ in Llama(CONFIG).named_parameters()} == names


def test_grouped_keys_and_values_are_narrow():
    attention = Llama(CONFIG).blocks[0].attention
    assert [tuple(p.weight.shape) for p in (attention.query, attention.key, attention.value)] == [
        (32, 32),
        (16, 32),
        (16, 32),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norm_sums_in_float32_at_least(dtype):
    """16-bit sums of 256 squares lose the smaller ones; float64 must not pass through float32."""
    wide = ModelConfig("llama", layers=1, width=256, heads=4, ffn=40, vocab=37, sequence=24)
    norm = Llama(wide).head.norm.to(dtype)
    x = (torch.randn(8, 256, dtype=torch.float64) * 3).to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + wide.norm_epsilon).rsqrt()
    error = (norm(x).double() - exact).abs().max().item()
    assert error < (1e-14 if dtype == torch.float64 else 4 * torch.finfo(dtype).eps)


def test_config_of_another_family_is_refused():
    with pytest.raises(UserError, match="family 'gpt'"):
        Llama(ModelConfig("gpt", layers=1, width=16, heads=4, vocab=37, sequence=24))
