"""Small models of every kind that the tests share."""

from dataclasses import replace

import pytest
import torch

from echelon.models import ExpertsConfig, ModelConfig, RopeScaling

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

_SMALL_MOE = ModelConfig("llama", layers=2, width=32, heads=4, kv_heads=2, vocab=37, sequence=64)
MIXTURES = {
    "mixtral": replace(_SMALL_MOE, experts=ExpertsConfig(4, 2, hidden=24, balance=0.02)),
    "qwen3_moe": replace(
        _SMALL_MOE,
        heads=3,
        kv_heads=1,
        head_width=12,
        qk_norm=True,
        ffn=40,
        norm_epsilon=1e-6,
        experts=ExpertsConfig(5, 3, hidden=24, normalize=False, first_dense=1, balance=0.001),
    ),
    "deepseek": replace(
        _SMALL_MOE,
        layers=3,
        ffn=40,
        experts=ExpertsConfig(6, 3, hidden=8, normalize=False, shared=16, first_dense=2, balance=0.001),
    ),
    "echelon": replace(
        _SMALL_MOE, tied=True, experts=ExpertsConfig(4, 2, hidden=24, shared=16, shared_gate=True)
    ),
    "noisy-top-k": replace(_SMALL_MOE, experts=ExpertsConfig(4, 2, hidden=24, gate="noisy-top-k", load=0.1)),
    "gshard": replace(_SMALL_MOE, experts=ExpertsConfig(4, 2, hidden=24, gate="gshard", capacity=1.5)),
    "sigmoid": replace(
        _SMALL_MOE,
        experts=ExpertsConfig(
            8, 3, hidden=8, gate="sigmoid", scale=2.5, groups=4, group_top_k=2, bias_rate=0.01
        ),
    ),
    "hierarchical": replace(
        _SMALL_MOE,
        experts=ExpertsConfig(8, 4, hidden=8, gate="hierarchical", groups=4, group_top_k=2, load=0.1),
    ),
    "gpt-experts": replace(
        SMALL["gpt"],
        experts=ExpertsConfig(4, 1, hidden=24, gate="switch", shared=8, first_dense=1, z_loss=0.01),
    ),
}


@pytest.fixture(params=SMALL)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """Each small dense config in turn."""
    return SMALL[request.param]


@pytest.fixture(params=SMALL | MIXTURES)
def any_config(request: pytest.FixtureRequest) -> ModelConfig:
    """Each small config in turn, also those with experts."""
    return (SMALL | MIXTURES)[request.param]


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(37, (2, 24), generator=torch.Generator().manual_seed(1))
