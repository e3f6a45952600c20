"""Products in 8 bits by the units of a GPU are those that tests on a CPU compute with rounded numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn import float8
from echelon.nn.float8 import Float8Linear, multiply_in_float8
from echelon.nn.wrapping import Wrapping, find_wrapper

tools = pytest.importorskip("tests.float8", reason="torchao is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device of compute capability 8.9",
    ),
]


def product_and_gradients(rows: int) -> list[Tensor]:
    torch.manual_seed(0)
    module: Any = nn.Linear(2048, 4096, device="cuda", dtype=torch.bfloat16)
    multiply_in_float8(module, echelon.Plan.parse("precision=fp8"), Wrapping())
    assert find_wrapper(module, Float8Linear) is not None
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output = module(x)
    output.backward(torch.randn_like(output))
    return [output.detach(), x.grad, module.weight.grad]


@pytest.mark.parametrize("rows", [7, 512])
def test_products_are_those_of_rounded_numbers(rows: int) -> None:
    on_device = product_and_gradients(rows)
    with tools.patch.object(float8, "EMULATES", True):
        wanted = product_and_gradients(rows)
    for got, exact in zip(on_device, wanted, strict=True):
        assert (got.double() - exact.double()).norm() < 2.0**-8 * exact.double().norm()


def losses(plan: str) -> list[float]:
    torch.manual_seed(0)
    model = build(ModelConfig("gpt", layers=2, width=2048, heads=16, vocab=512, sequence=256))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(512, (4, 257), generator=generator)
    with echelon.parallelize(
        model, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4), loss=cross_entropy
    ) as engine:
        return [engine.step((tokens[:, :-1], tokens[:, 1:])).loss for _ in range(10)]


@pytest.mark.parametrize("words", ["", "compile=true", "recompute=selective", "microbatches=2 compile=true"])
def test_losses_are_near_those_of_bf16(words: str) -> None:
    trained = losses(f"precision=fp8 {words}")
    assert trained == pytest.approx(losses("precision=bf16"), rel=0.02)
    assert trained[-1] < trained[0] - 0.5
