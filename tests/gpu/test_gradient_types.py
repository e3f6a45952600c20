"""Gradients of 16-bit weights on a GPU: products that stay as they are, and float32 sums that they are added
to without being rounded."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.wrapping import Wrapping, find_wrapper
from echelon.parallel.data.grad_accumulation import AccumulatingLinear, Accumulation, accumulate_in_place
from echelon.parallel.data.sharing import Sharing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, FP32 = torch.bfloat16, torch.float32
CONFIG = ModelConfig("gpt", layers=2, width=512, heads=8, vocab=256, sequence=64)


def test_products_are_added_without_being_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(512, 1024, device="cuda", dtype=BF16)
    layer.weight.grad_dtype = FP32
    accumulation = Accumulation()
    accumulate_in_place(layer, dict.fromkeys(layer.parameters(), accumulation), Wrapping())
    assert find_wrapper(layer, AccumulatingLinear) is not None
    accumulation.is_open = True
    layer.weight.grad = torch.zeros(1024, 512, device="cuda")
    added, addmm = [], torch.addmm

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        added.append(kwargs["out_dtype"])
        return addmm(*args, **kwargs)

    monkeypatch.setattr(torch, "addmm", spy)
    exact = torch.zeros(1024, 512, device="cuda", dtype=torch.float64)
    for _ in range(8):
        x, gradient = (torch.randn(2, 128, n, device="cuda", dtype=BF16) for n in (512, 1024))
        layer(x).backward(gradient)
        exact += gradient.flatten(0, 1).double().T @ x.flatten(0, 1).double()
    assert added == [FP32] * 8
    error = (layer.weight.grad.double() - exact).norm() / exact.norm()
    assert error < 1e-5, "of products in bf16 it is 1e-3"


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    """Gradients of one microbatch are kept for this one alone: it takes them without a copy."""
    # Kernels that add in any order differ by rounding from run to run, which larger updates multiply.
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def losses(plan: str, *, keeps: bool) -> list[float]:
    torch.manual_seed(0)
    model = build(CONFIG)
    tokens = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(1))
    keep = Sharing.keep_products if keeps else lambda *_: None
    with (
        patch.object(Sharing, "keep_products", keep),
        echelon.parallelize(
            model, f"{plan} precision=bf16", optimizer=fused_adamw, loss=cross_entropy
        ) as engine,
    ):
        found = [engine.step((tokens, tokens)).loss for _ in range(6)]
        assert any(p.grad_dtype is None for p in model.parameters()) == keeps
    return found


@pytest.mark.parametrize("plan", ["microbatches=1", "microbatches=4", "microbatches=4 compile=true"])
def test_models_train_as_with_gradients_that_autograd_converts(plan: str) -> None:
    kept = losses(plan, keeps=True)
    assert kept == pytest.approx(losses(plan, keeps=False), rel=2e-3)
    assert kept[-1] < kept[0] - 0.05
