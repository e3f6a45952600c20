"""Small models of every kind that the tests share."""

import pytest
import torch

from echelon.models import ModelConfig, RopeScaling

SMALL = {
    "gpt": ModelConfig("gpt", layers=2, width=16, heads=4, vocab=37, sequence=24),
    "gpt-tied": ModelConfig("gpt", layers=2, width=16, heads=4, vocab=37, sequence=24, ffn=40, tied=True),
    "llama": ModelConfig("llama", layers=2, width=32, heads=4, kv_heads=2, ffn=40, vocab=37, sequence=64),
    "llama-tied-stretched": ModelConfig(
        "llama",
        layers=2,
        width=32,
        heads=4,
        kv_heads=1,
        ffn=40,
        vocab=37,
        sequence=64,
        tied=True,
        norm_epsilon=1e-6,
        rope_theta=500.0,
        rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_sequence=16),
    ),
}


@pytest.fixture(params=SMALL)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """Each small config in turn."""
    return SMALL[request.param]


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(37, (2, 24), generator=torch.Generator().manual_seed(1))
