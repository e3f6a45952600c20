"""Experts under what echelon does with passes: split backwards, second runs, compiled layers, autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from echelon.engine.step.runtime.split_backward import SplitBackward
from echelon.nn.experts import Experts, MixtureOfExperts, SoftmaxGate, compute

WIDTH, HIDDEN, EXPERTS = 6, 5, 4


def make_layer() -> MixtureOfExperts:
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    return MixtureOfExperts(SoftmaxGate(WIDTH, EXPERTS, 2), Experts(EXPERTS, WIDTH, HIDDEN), shared).double()


def draw() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(2, 7, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return x.requires_grad_(), gradient


def expected_gradients(layer: nn.Module) -> list[Tensor]:
    x, gradient = draw()
    return list(torch.autograd.grad(layer(x), [x, *layer.parameters()], gradient))


def assert_same(found: list[Any], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_split_backward_pass_computes_each_product_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer()
    expected = expected_gradients(layer)
    calls: list[str] = []
    for name in ("multiply", "outer"):
        original = getattr(compute, name)

        def noted(*args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(compute, name, noted)
    x, gradient = draw()
    output = layer(x)
    calls.clear()
    split = SplitBackward([get_gradient_edge(output)], [gradient], [x])
    del output
    found = split.for_inputs()
    assert calls == ["multiply", "multiply"]
    assert all(parameter.grad is None for parameter in layer.parameters())
    calls.clear()
    split.for_weights()
    assert calls.count("outer") == 2
    assert_same([*found, *(parameter.grad for parameter in layer.parameters())], expected)


def test_a_layer_that_runs_again() -> None:
    layer = make_layer()
    x, gradient = draw()
    output = checkpoint(layer, x, use_reentrant=False)
    found = torch.autograd.grad(output, [x, *layer.parameters()], gradient)
    assert_same(list(found), expected_gradients(layer))


def test_saved_tensors_may_come_back_as_copies() -> None:
    layer = make_layer()
    x, gradient = draw()
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        output = layer(x)
    found = torch.autograd.grad(output, [x, *layer.parameters()], gradient)
    assert_same(list(found), expected_gradients(layer))


@pytest.mark.parametrize("names", [["gate_up_proj"], ["down_proj"], ["gate_up_proj", "down_proj"]])
def test_frozen_matrices_get_no_gradient(names: list[str]) -> None:
    layer = make_layer()
    expected = dict(zip(["x", *dict(layer.named_parameters())], expected_gradients(layer), strict=True))
    for name in names:
        layer.experts.get_parameter(name).requires_grad_(False)
    x, gradient = draw()
    layer(x).backward(gradient)
    assert_same([x.grad], [expected["x"]])
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert_same([parameter.grad], [expected[name]])
        else:
            assert parameter.grad is None


def test_autocast_multiplies_in_its_type() -> None:
    layer = make_layer().float()
    x, gradient = (tensor.detach().float() for tensor in draw())
    with torch.autocast("cpu", torch.bfloat16):
        output = layer.experts(x.flatten(0, 1), *layer.gate(x))
    assert output.dtype == torch.bfloat16
    output.float().backward(gradient.flatten(0, 1))
    assert {parameter.grad.dtype for parameter in layer.experts.parameters()} == {torch.float32}  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, of a graph that breaks
def test_compiled_experts() -> None:
    layer = make_layer()
    x, gradient = (tensor.detach().flatten(0, 1) for tensor in draw())
    with torch.no_grad():
        routing = layer.gate(x[None])

    def run(experts: nn.Module, x: Tensor) -> Tensor:
        computed: Tensor = experts(2 * x, *routing)
        return computed.sin()

    found, expected = (
        torch.autograd.grad(function(layer.experts, x), list(layer.experts.parameters()), gradient)
        for function in (torch.compile(run, backend="aot_eager"), run)
    )
    assert_same(list(found), list(expected))
