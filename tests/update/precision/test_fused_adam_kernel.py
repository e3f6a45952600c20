"""The kernel makes the update of Adam as it is written down; a stand-in for Triton runs it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from echelon.update.precision.fused_adam import Element
from tests.update.precision.adam_on_cpu import adam_on_cpu

# One element, less and more than a tile, exactly one, and two with a rest.
SIZES = [1, 7, 512, 513, 1300]
GROUP = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.3, "eps": 1e-3}
STEPS = [1.0, 5.0, 2.0, 3.0, 4.0]


@pytest.fixture
def kernel() -> Iterator[Any]:
    with adam_on_cpu() as module:
        yield module


def make_elements(gradient_type: torch.dtype) -> list[Element]:
    torch.manual_seed(0)
    elements = []
    for size, step in zip(SIZES, STEPS, strict=True):
        master, mean, gradient = (torch.randn(size) for _ in range(3))
        weight, square = torch.zeros(size, dtype=torch.float16), torch.rand(size)
        elements.append(Element(weight, gradient.to(gradient_type), master, mean, square, torch.tensor(step)))
    return elements


def expected(element: Element, scale: float, *, decoupled: bool) -> list[torch.Tensor]:
    """weight, master and both moments, in float64."""
    rate, (beta1, beta2), decay, eps = GROUP.values()  # type: ignore[misc]
    gradient, master = element.gradient.double() / scale, element.master.double()
    if decoupled:
        master = master - rate * decay * master
    else:
        gradient = gradient + decay * master
    mean = beta1 * element.mean.double() + (1 - beta1) * gradient
    square = beta2 * element.square.double() + (1 - beta2) * gradient**2
    first, second = 1 - beta1 ** float(element.step), 1 - beta2 ** float(element.step)
    master = master - rate / first * mean / ((square / second).sqrt() + eps)
    return [master, mean, square]


@pytest.mark.parametrize("gradient_type", [torch.float32, torch.float16])
@pytest.mark.parametrize("decoupled", [None, False, True])
def test_it_is_adam(kernel: Any, decoupled: bool | None, gradient_type: torch.dtype) -> None:
    elements = make_elements(gradient_type)
    results = [expected(element, 4.0, decoupled=bool(decoupled)) for element in elements]
    group = GROUP if decoupled is None else GROUP | {"decoupled_weight_decay": decoupled}
    table = kernel.Table(elements)
    assert table.num_programs == 1 + 1 + 1 + 2 + 3
    kernel.update(table, torch.tensor(STEPS).double(), torch.tensor(4.0), torch.tensor(0.0), group)
    for element, result in zip(elements, results, strict=True):
        for ours, theirs in zip((element.master, element.mean, element.square), result, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=1e-6)
        assert torch.equal(element.weight, element.master.half())


def test_a_skipped_update_writes_nothing(kernel: Any) -> None:
    elements = make_elements(torch.float32)
    before = [[tensor.clone() for tensor in element] for element in elements]
    kernel.update(
        kernel.Table(elements), torch.tensor(STEPS).double(), torch.tensor(4.0), torch.tensor(1.0), GROUP
    )
    assert all(
        torch.equal(now, then)
        for element, tensors in zip(elements, before, strict=True)
        for now, then in zip(element, tensors, strict=True)
    )
