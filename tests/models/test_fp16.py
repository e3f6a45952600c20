"""Models in fp16: what is larger than 65,504 inside of a norm, of attention or of a loss is not infinite."""

import pytest
import torch
from torch import Tensor, nn

from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.losses import summed_cross_entropy
from echelon.nn.sequence import WHOLE

HALF = torch.float16
CONFIGS = {
    "gpt": ModelConfig("gpt", layers=1, width=64, heads=4, vocab=32, sequence=16),
    "llama": ModelConfig("llama", layers=1, width=64, heads=4, vocab=32, sequence=16, kv_heads=2),
}


def relative(low: Tensor, exact: Tensor) -> float:
    assert low.isfinite().all()
    return float(((low.double() - exact.double()).norm() / exact.double().norm()).detach())


@pytest.mark.parametrize("family", CONFIGS)
def test_norms_take_squares_in_float32(family: str) -> None:
    """Of hidden states of 1,000: their squares alone are more than fp16 holds."""
    torch.manual_seed(0)
    norm = build(CONFIGS[family]).head.norm
    x = 1000 * torch.randn(2, 16, 64)
    low = norm.half()(x.half())
    assert low.dtype == HALF
    assert relative(low, norm.float()(x)) < 2e-3


@pytest.mark.parametrize("family", CONFIGS)
def test_blocks_and_their_gradients_are_those_of_float32(family: str) -> None:
    torch.manual_seed(0)
    block = build(CONFIGS[family]).blocks[0]
    x, direction = 500 * torch.randn(2, 16, 64), torch.randn(2, 16, 64)
    results = []
    for dtype in (HALF, torch.float32):
        leaf = x.to(dtype).requires_grad_()
        output = block.to(dtype)(leaf)
        block.zero_grad()
        output.backward(direction.to(dtype))
        gradients = [p.grad.float() for p in block.parameters() if p.grad is not None]
        results.append((output.detach(), torch.cat([each.flatten() for each in gradients])))
    (low, low_gradients), (exact, gradients) = results
    assert relative(low, exact) < 2e-3
    assert relative(low_gradients, gradients) < 2e-2


def test_attention_scores_may_be_larger_than_fp16_holds() -> None:
    """300 · 300 · 16 / 4 is 360,000."""
    torch.manual_seed(0)
    query, key = (300 * torch.randn(1, 2, 8, 16).sign() for _ in range(2))
    value = torch.randn(1, 2, 8, 16)
    low = WHOLE.attend(query.half(), key.half(), value.half())
    assert relative(low, WHOLE.attend(query, key, value)) < 1e-3


@pytest.mark.parametrize("loss", ["models", "parts"])
def test_losses_are_summed_in_float32(loss: str) -> None:
    torch.manual_seed(0)
    logits = 30 * torch.randn(4000, 32)
    targets = torch.randint(32, (4000,))
    low = logits.half().requires_grad_()
    exact = logits.requires_grad_()
    for each in (low, exact):
        total = cross_entropy(each, targets)[0] if loss == "models" else summed_cross_entropy(each, targets)
        assert total.dtype == torch.float32
        assert total > 65504
        (total / 4000 * 1024).backward()
    assert low.grad is not None
    assert exact.grad is not None
    assert relative(low.grad, exact.grad) < 2e-2


def test_running_statistics_take_squares_in_float32() -> None:
    norm = nn.BatchNorm1d(4).half()
    x = 1000 * torch.randn(64, 4)
    assert relative(norm(x.half()), nn.BatchNorm1d(4)(x)) < 2e-3
