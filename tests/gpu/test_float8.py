"""Products in 8 bits by the units of a GPU are those that tests on a CPU compute with rounded numbers."""

from collections.abc import Callable
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


WORDS = ("", "compile=true", "recompute=selective", "microbatches=2 compile=true")
Make = Callable[[Any], torch.optim.Optimizer]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def subtract(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def train(
    plan: str, make: Make, steps: int, *, emulates: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build(ModelConfig("gpt", layers=2, width=2048, heads=16, vocab=512, sequence=256))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(512, (4, 257), generator=generator)
    with (
        tools.patch.object(float8, "EMULATES", emulates),
        echelon.parallelize(model, plan, optimizer=make, loss=cross_entropy) as engine,
    ):
        losses = [engine.step((tokens[:, :-1], tokens[:, 1:])).loss for _ in range(steps)]
        return losses, engine.full_state_dict()


@pytest.mark.parametrize("words", WORDS)
def test_losses_are_those_of_rounded_numbers(words: str) -> None:
    """The model learns its batch by heart, so losses end near 0: allowed is a share of the first one."""
    losses, _ = train(f"precision=fp8 {words}", adam, 10)
    emulated, _ = train(f"precision=fp8 {words}", adam, 10, emulates=True)
    in_bf16, _ = train(f"precision=bf16 {words}", adam, 10)
    assert losses == pytest.approx(emulated, abs=0.01 * emulated[0])
    assert losses == pytest.approx(in_bf16, abs=0.02 * in_bf16[0])
    assert losses[-1] < losses[0] / 2


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((one[name].double() - other[name].double()).square().sum()) for name in one) ** 0.5


@pytest.mark.parametrize("words", WORDS)
def test_gradients_are_nearer_to_those_of_rounded_numbers_than_to_bf16(words: str) -> None:
    """Weights less their gradients. Units add up in another order than the emulation: where that changes the
    last bit of an output, 8 bits of it may be others too. With every last bit at random, gradients on a CPU
    are 0.8 times as far from the emulation as from bf16; products in bf16 would be nearer to those."""
    _, weights = train(f"precision=fp8 {words}", subtract, 1)
    _, emulated = train(f"precision=fp8 {words}", subtract, 1, emulates=True)
    _, in_bf16 = train(f"precision=bf16 {words}", subtract, 1)
    assert distance(weights, emulated) < distance(weights, in_bf16)
