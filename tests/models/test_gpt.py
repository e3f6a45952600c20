import pytest
import torch

from echelon.errors import UserError
from echelon.models import GPT, ModelConfig

CONFIG = ModelConfig("gpt", layers=2, width=16, heads=4, vocab=37, sequence=24)


def test_names_of_parameters():
    parts = ["attention.query", "attention.key", "attention.value", "attention.output", "mlp.up", "mlp.down"]
    block = {
        f"{part}.{kind}" for part in [*parts, "attention_norm", "mlp_norm"] for kind in ("weight", "bias")
    }
    names = {f"blocks.{i}.{name}" for i in range(2) for name in block}
    names |= {"embedding.tokens.weight", "embedding.positions.weight"}
    names |= {"head.norm.weight", "head.norm.bias", "head.projection.weight"}
    assert {name for name, _ in GPT(CONFIG).named_parameters()} == names


def test_too_long_a_sequence_is_refused():
    with pytest.raises(UserError, match="a sequence of 25 tokens: this GPT has learned 24 positions"):
        GPT(CONFIG)(torch.zeros(1, 25, dtype=torch.int64))


def test_config_of_another_family_is_refused():
    with pytest.raises(UserError, match="family 'llama'"):
        GPT(ModelConfig("llama", layers=1, width=16, heads=4, vocab=37, sequence=24))
